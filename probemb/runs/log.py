"""A run's log: metrics.jsonl, TensorBoard, and Weights & Biases on request."""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from pathlib import Path

from probemb.errors import UserError
from probemb.files import replace_text


class RunLog:
    """Writes to a run folder; only rank 0 has one.

    Args:
        run: the run folder.
        step: the step that the run goes on from; what an interrupted attempt logged after it is dropped.
        wandb_project: a Weights & Biases project, or None.
        config: the resolved configuration, for wandb.
    """

    def __init__(self, run: Path, step: int, wandb_project: str | None, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.path = run / "metrics.jsonl"
        drop_lines_after(self.path, step)
        self.file = self.path.open("a", encoding="utf-8")
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        self.wandb = _start_wandb(wandb_project, run, config)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl, and a point of every curve."""
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(values, step=step)

    def close(self) -> None:
        """Flush everything."""
        self.file.close()
        self.board.close()
        if self.wandb:
            self.wandb.finish()


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of a jsonl file that an interrupted attempt wrote after a step; no file, nothing to drop."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # the last line of a killed run may be cut
    replace_text(path, "".join(kept))


def _start_wandb(project: str | None, run: Path, config: dict):
    if not project:
        return None
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "wandb was asked for and is not installed.", "Run `pip install wandb`, or leave --wandb out."
        ) from error
    try:
        return wandb.init(
            project=project, name=run.name, dir=str(run), config=config, resume="allow", id=_wandb_id(run)
        )
    except wandb.Error as error:
        raise UserError(
            f"Weights & Biases does not start ({' '.join(str(error).split())[:200]}).",
            "Run `wandb login`, or leave --wandb out.",
        ) from error


def _wandb_id(run: Path) -> str:
    """The same for a run that goes on, another for a run of the same name elsewhere."""
    path = run / "wandb" / "id"
    if not path.exists():
        replace_text(path, f"{secrets.token_hex(8)}\n")
    return path.read_text(encoding="utf-8").strip()


def duration(seconds: float) -> str:
    """h:mm:ss, with days where there are any."""
    return str(timedelta(seconds=round(seconds)))
