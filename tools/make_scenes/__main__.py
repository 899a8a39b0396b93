"""`python -m tools.make_scenes`: see `command.py`."""

from probemb.cli.command import run_command
from tools.make_scenes.command import main

if __name__ == "__main__":
    run_command(main)
