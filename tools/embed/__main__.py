"""`python -m tools.embed`."""

from probemb.cli.command import run_command
from tools.embed.command import main

if __name__ == "__main__":
    run_command(main)
