"""`python -m tools.claims`: see `command.py`."""

from probemb.cli.command import run_command
from tools.claims.command import main

if __name__ == "__main__":
    run_command(main)
