"""`python -m tools.search`: see `command.py`."""

from probemb.cli.command import run_command
from tools.search.command import main

if __name__ == "__main__":
    run_command(main)
