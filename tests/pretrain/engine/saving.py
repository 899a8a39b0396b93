"""Save a checkpoint in the foreground."""

from pathlib import Path

from pretrain.engine.checkpoint import take_snapshot
from probemb.distributed import agree
from probemb.errors import UserError


def save_checkpoint(engine, run_dir: Path, step: int, state: dict, average=None) -> Path:
    """`take_snapshot` and `Snapshot.write` at once; collective. Raises UserError on all ranks."""
    snapshot, failure = take_snapshot(engine, step, state, average), None
    if snapshot:
        try:
            snapshot.write(run_dir)
        except UserError as error:
            failure = error
    agree(failure)
    return run_dir / "checkpoints" / f"step-{step}"
