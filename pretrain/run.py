"""Pretrain PCME++, ProLIP, CLIP or SigLIP on webdataset shards.

    torchrun --nproc-per-node 8 -m pretrain.run --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml
    python -m pretrain.run --config pretrain/configs/scenes.yaml --out runs/scenes  # one process, no GPU needed

Add `--resume` to resume from the newest checkpoint in --out. The run folder holds config.yaml (resolved),
metrics.jsonl, tensorboard/, checkpoints/step-N/ and model/, which `probemb.load_model` reads.
SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end a run after the step, or while it waits for data, with a checkpoint.
"""

import os

from pretrain.config import Config
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.errors import UserError
from probemb.runs.preemption import Preemption


def main() -> int:
    """Read the configuration and train; returns the exit code."""
    config = parse_config(Config, "python -m pretrain.run", "Pretrain PCME++, ProLIP, CLIP or SigLIP on shards.")
    with Preemption() as preemption:
        config.check(int(os.environ.get("WORLD_SIZE", "1")))
        if not config.train_paths:
            raise UserError("There is no training data.", "Pass --data.train FOLDER with webdataset shards.")
        from pretrain.start import train

        return train(config, preemption)


if __name__ == "__main__":
    run_command(main)
