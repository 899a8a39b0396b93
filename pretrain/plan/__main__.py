"""`python -m pretrain.plan`."""

from pretrain.plan.command import main
from probemb.cli.command import run_command

if __name__ == "__main__":
    run_command(main)
