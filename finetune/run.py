"""Finetune PCME++, or any method it is compared with.

    accelerate launch -q --config_file finetune/accelerate.yaml finetune/run.py --method pcmepp \\
        --data.path dataset_coco.json --data.images coco --out runs/coco
    python -m finetune.run --method vse --data.path data/scenes --out runs/vse \\
        --model.name scenes-cnn-gru --model.pretrained runs/scenes   # one process, no GPU needed, synthetic data

Add `--resume` to resume. SIGTERM and SIGUSR1 end a run after the step, with a checkpoint and exit code 85.
"""

import os
import signal
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.config import Config, check, shortened, with_method_file
from finetune.methods import GROUPS
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.runs.preemption import Preemption


def main() -> int:
    """Read the configuration and train; returns the exit code: 0, or another one when it was asked to stop."""
    argv = with_method_file(sys.argv[1:])
    groups = [f"  {group}: {', '.join(methods)}" for group, methods in GROUPS.items()]
    description = "\n".join(["Finetune PCME++, or another method, on images with captions. --method takes", *groups])
    config, told = shortened(parse_config(Config, "python -m finetune.run", description, argv), argv)
    if config.method == "pcme" and sum(word.startswith("--config") for word in argv) == 1:
        told += "\n" * bool(told) + "recipe  of PCME++'s comparison; PCME's own: "
        told += "--config finetune/recipes/pcme-coco.yaml or pcme-cub.yaml"
    if told and os.environ.get("RANK", "0") == "0":
        print(told, flush=True)
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":  # accelerate launch --cpu
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with Preemption() as preemption:
        preemption.interrupting = (signal.SIGINT,)  # until the first step: nothing would be saved
        check(config, int(os.environ.get("WORLD_SIZE", "1")))

        from finetune.train import train

        return train(config, preemption)


if __name__ == "__main__":
    run_command(main)
