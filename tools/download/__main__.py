"""`python -m tools.download`: see `command.py`."""

from probemb.cli.command import run_command
from tools.download.command import main

if __name__ == "__main__":
    run_command(main)
