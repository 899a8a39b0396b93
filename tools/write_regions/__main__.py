"""`python -m tools.write_regions`."""

from probemb.cli.command import run_command
from tools.write_regions.command import main

if __name__ == "__main__":
    run_command(main)
