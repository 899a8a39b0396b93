"""What a run tells while it goes: the means of every log line, the line that people read, and the samples seen."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from probemb import distributed
from probemb.runs.log import drop_lines_after, duration


class Window:
    """Means over the steps between two log lines; scalars stay on the device until then."""

    def __init__(self, stream):
        self.stream = stream
        self.restart()

    def restart(self) -> None:
        """Begin anew, without what happened since."""
        self.sums: dict[str, Tensor] = {}
        self.n = self.stepped = 0
        self.started, self.waited = time.perf_counter(), self.stream.wait_seconds

    def add(self, terms: dict[str, Tensor] | None) -> None:
        """One step's detached scalars; None for a step that was skipped."""
        self.n += 1
        if terms is not None:
            self.sums = {k: self.sums[k] + v for k, v in terms.items()} if self.sums else dict(terms)
            self.stepped += 1

    def close(self, device: torch.device, batch_size: int, steps_left: int) -> dict[str, float]:
        """Means over steps and ranks, and speed: images/s over all ranks, share of time waiting for data, ETA in s.

        Without the means if every step was skipped.
        """
        names = list(self.sums)
        means = torch.stack([self.sums[k].double().reshape(()) for k in names]) / self.stepped if names else None
        means = means.tolist() if names else []
        seconds = time.perf_counter() - self.started
        waited = (self.stream.wait_seconds - self.waited) / seconds
        values = distributed.mean_over_ranks(dict(zip(names, means)) | {"data_wait": waited}, device)
        values |= {"images_per_second": self.n * batch_size / seconds, "eta": steps_left * seconds / self.n}
        self.restart()
        return values


class SampleLog:
    """The keys of the samples that a rank has trained on, a line a step: samples/rank-R.jsonl.

    Args:
        run: the run folder.
        step: as for `RunLog`; rank 0 also cuts what ranks wrote that are not there any more.
    """

    def __init__(self, run: Path, step: int, rank: int, world_size: int):
        folder = run / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".rank-{rank}.jsonl.*"):  # a killed attempt was writing it aside
            left.unlink(missing_ok=True)
        for path in folder.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdigit() and (int(number) == rank or (rank == 0 and int(number) >= world_size)):
                drop_lines_after(path, step)
        self.file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, keys: list[str]) -> None:
        """The samples of one step."""
        self.file.write(json.dumps({"step": step, "keys": keys}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Flush everything."""
        self.file.close()


def train_line(step: int, steps: int, v: dict[str, float]) -> str:
    """The line that people read; `v` as in metrics.jsonl."""
    at = f"step {step:>{len(str(steps))}}/{steps}"
    skipped = [f"{v['skipped']} steps skipped (NaN or Inf)"] if v.get("skipped") else []
    speed = [f"{v['images_per_second']:.0f} images/s, data {100 * v['data_wait']:.0f} %"]
    ends = [f"lr {v['lr']:.1e}", f"ETA {duration(v['eta'])}"]
    if "loss" not in v:
        return " | ".join([at, "every step since the last line was skipped", *skipped, *speed, *ends])
    parts = [f"clip {v['clip']:.3f}", f"match {v['match']:.3f}", f"vib {v['vib']:.2f}"]
    if "pseudo_positive" in v:
        parts.append(f"pp {v['pseudo_positive']:.3f}")
    return " | ".join(
        [
            at,
            f"loss {v['loss']:.3f} ({', '.join(parts)})",
            f"a {v['scale']:.2f} b {v['shift']:.2f}",
            f"u image {v['u_image']:.3f} text {v['u_text']:.3f}",
            *skipped,
            *speed,
            *ends,
        ]
    )


def evaluation_line(step: int, steps: int, v: dict[str, float]) -> str:
    """The line that people read after an evaluation."""
    top1, top5 = 100 * v["zeroshot_top1"], 100 * v["zeroshot_top5"]
    return f"step {step:>{len(str(steps))}}/{steps} | zero-shot top-1 {top1:.2f} %, top-5 {top5:.2f} %"
