"""Count of a training step's waits of the host for the device."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import TINY, Pool, configured, free, make_trainer, model_of

STEPS = 4
AT_MOST = 1  # waits of a step


class Reads(TorchDispatchMode):
    """Operators for which the host would wait on a GPU: those that it reads, and lift_fresh, a copy of its numbers."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
    WAITING += ("lift_fresh",)

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in self.WAITING:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(gpu: bool) -> Iterator[list[str]]:
    """Places where the host waited meanwhile: lines of code, as CUDA tells them, or names of operators."""
    if not gpu:
        with Reads() as reads:
            yield reads.seen
        return
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen += [f"{Path(one.filename).name}:{one.lineno}" for one in told if "synchroniz" in str(one.message)]


def host_waits(place: Place, notes: Notes) -> None:
    """Steps that are queued one after the other, as in a run; and the time that the host needs to queue one."""
    name, rows = (TINY, 8) if place.small else ("ViT-B-16", 128)
    cases = {f"ZeRO {stage}": configured(name, rows, zero_stage=stage) for stage in (0, 1, 2, 3)}
    prolip = configured(name, rows, "prolip")
    model, loss = replace(prolip.model, patch_dropout=0.5), replace(prolip.loss, masked_inclusion=1e-3)
    cases["prolip, patches dropped, masked copies"] = replace(prolip, model=model, loss=loss)
    for case, config in cases.items():
        trainer = make_trainer(config, "bf16" if place.gpu else "fp32", place.device)
        batches = list(Pool.of(model_of(trainer), rows, place.device).batches(2))
        for batch in batches:  # the first steps make Adam's moments, and read the stack once
            trainer.queue_step(*batch)
        trainer.read_outcome()
        trainer.queue_step(*batches[0])
        with watched(place.gpu) as seen:
            for i in range(STEPS):
                trainer.queue_step(*batches[i % 2])
        trainer.read_outcome()
        notes.value(f"{case}: waits of {STEPS} steps", dict(Counter(seen)) or "none")
        began = time.perf_counter()
        trainer.queue_step(*batches[0])
        notes.value(f"{case}: ms to queue a step", 1000 * (time.perf_counter() - began))
        trainer.read_outcome()
        notes.value(f"{case}: ms until it is done", 1000 * (time.perf_counter() - began))
        free(trainer)
        if config.engine.zero_stage < 3:  # DeepSpeed's third stage waits for its own streams
            notes.claim(f"{case}: a step waits at most {AT_MOST} time", len(seen) <= AT_MOST * STEPS)
