"""A trace of some steps by torch's profiler, for chrome://tracing or ui.perfetto.dev, on request."""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch

from pretrain.config import Config
from probemb import distributed
from probemb.files import replace_file
from probemb.runs.log_file import Warnings

LARGEST = 1 << 30  # bytes of a trace before it is compressed; about a tenth of it afterwards


def make_profiler(config: Config, device: torch.device) -> StepProfiler | None:
    """Profiler that `config.profile` asks of this rank."""
    if not config.profile or distributed.rank():
        return None
    return StepProfiler(Path(config.out), *config.profile, device)


class StepProfiler:
    """Traces rank 0's steps `first` to `last` to profile/steps-FIRST-LAST.json.gz in the run folder.

    The trace has operators, kernels and copies, and a range "step N" for each step from its wait for data to its
    optimizer; what follows a step (log lines, checkpoints, evaluations) is between the ranges. Steps that the run does
    not take are missing, and a trace that would be larger than `LARGEST` is left out: both only cost the trace.
    """

    def __init__(self, run: Path, first: int, last: int, device: torch.device):
        self.path, self.first, self.last = run / "profile" / f"steps-{first}-{last}.json.gz", first, last
        self.warnings = Warnings()
        self._gpu = device.type == "cuda"
        if not self._gpu:  # else the profiler's own lines say that it found no driver
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile: torch.profiler.profile | None = None
        self._range = ExitStack()

    def begin(self, step: int) -> None:
        """A step begins."""
        if step == self.first:
            kinds = torch.profiler.ProfilerActivity
            self._profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if self._gpu else [kinds.CPU])
            self._profile.start()
        if self._profile:
            self._range.enter_context(torch.profiler.record_function(f"step {step}"))

    def end(self, step: int) -> None:
        """The step has been queued; the last one's trace is written, once the device is done."""
        self._range.close()
        if self._profile and step == self.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is being taken; never raises."""
        self._range.close()
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._gpu:
            torch.cuda.synchronize()
        profile.stop()
        try:
            replace_file(self.path, lambda aside: _write(profile, aside))
            print(f"profile {self.path}: open it in ui.perfetto.dev or chrome://tracing", flush=True)
        except (OSError, RuntimeError) as error:  # the run must not depend on it
            self.warnings.tell(self.path, error)


def _write(profile: torch.profiler.profile, aside: Path) -> None:
    plain = aside.with_name(f"{aside.name}.json")
    try:
        profile.export_chrome_trace(str(plain))
        if (size := plain.stat().st_size) > LARGEST:
            raise OSError(f"the trace has {size / 2**30:.1f} GiB; profile fewer steps")
        with open(plain, "rb") as source, open(aside, "wb") as file, gzip.GzipFile("", "wb", 6, file) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
