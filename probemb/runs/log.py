"""The log of a run: means over steps, metrics.jsonl, TensorBoard, Weights & Biases, and the lines that are printed."""

import json
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from probemb import distributed
from probemb.errors import UserError
from probemb.files import replace_text


class Window:
    """Means and speed, in `unit`s like "images", over the steps between two log lines; `waited`: seconds for data."""

    def __init__(self, unit: str, waited: Callable[[], float], device: torch.device | str = "cpu"):
        self.unit, self.waited, self.device = unit, waited, torch.device(device)
        self.restart()

    def restart(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.n, self.began, self.waited_before = 0, time.perf_counter(), self.waited()

    def add(self, terms: dict[str, Tensor | float] | None) -> None:
        """Add one step's detached scalars, which may differ between steps; None for a skipped step."""
        self.n += 1
        for name, value in (terms or {}).items():
            self.sums[name] = self.sums[name] + value if name in self.sums else torch.as_tensor(value)
            self.counts[name] += 1

    def read(self, batch_size: int, steps_left: int) -> dict[str, float]:
        """Means over steps and ranks, none if every step was skipped, and over all ranks samples/s, tokens/s for terms
        with "text_tokens" of each text, share of time waiting for data, ETA in s, most bytes used so far. Collective.
        """
        sums = [self.sums[name].to(self.device).double().reshape(()) / n for name, n in self.counts.items()]
        means = dict(zip(self.counts, torch.stack(sums).tolist() if sums else []))
        seconds = time.perf_counter() - self.began
        waited = (self.waited() - self.waited_before) / seconds
        values = distributed.mean_over_ranks(means | {"data_wait": waited}, self.device)
        on_gpu, resident = self.device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else 1024 * resident
        values["memory"] = float(max(distributed.all_of(peak)))
        values |= {f"{self.unit}_per_second": self.n * batch_size / seconds, "eta": steps_left * seconds / self.n}
        if "text_tokens" in values:
            values["tokens_per_second"] = values["text_tokens"] * self.n * batch_size / seconds
        return values


# -------------------------------------------------------------------------------------------------------------- files
_told: set[str] = set()  # write errors that were reported already: a failing log does not end a run


def or_tell(what: object, write: Callable[[], object]) -> None:
    """Call `write`; an error is told once, and the run continues."""
    try:
        write()
    except Exception as error:  # any, of any package
        if str(what) not in _told:
            reason = getattr(error, "strerror", None) or error
            print(f"warning: {what} cannot be written ({reason}); the run continues.", file=sys.stderr, flush=True)
        _told.add(str(what))


def append_line(path: Path, values: dict) -> None:
    def append() -> None:
        with path.open("a", encoding="utf-8") as file:
            # A disk that was full may have cut the line before.
            file.write(f"{chr(10) * (str(path) in _told)}{json.dumps(values)}\n")

    or_tell(path, append)


class RunLog:
    """Writes to a run folder; only rank 0 has one. Entries of an interrupted attempt after `step` are dropped."""

    def __init__(self, run: Path, step: int, wandb=None):
        drop_lines_after(run / "metrics.jsonl", step)
        self.run, self.wandb = run, wandb
        # Its thread never flushes, as it would die of a full disk.
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1, flush_secs=10**9)

    def write(self, step: int, values: dict[str, float]) -> None:
        def draw() -> None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

        append_line(self.run / "metrics.jsonl", {"step": step, "time": round(time.time(), 3), **values})
        or_tell(self.run / "tensorboard", draw)
        if self.wandb:
            or_tell("wandb", lambda: self.wandb.log(values, step=step))

    def close(self) -> None:
        or_tell(self.run / "tensorboard", self.board.close)
        if self.wandb:
            or_tell("wandb", self.wandb.finish)


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines that an interrupted attempt wrote after a step, if there is such a file."""
    if path.is_file():
        replace_text(path, "".join(f"{line}\n" for line, values in logged_lines(path) if values["step"] <= step))


def logged_lines(path: Path) -> list[tuple[str, dict]]:
    """The whole lines of a run's jsonl file, each with what it says; none if there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, AttributeError):  # the last line of a killed run may be cut
            values = json.loads(line)
            if isinstance(values.get("step"), int):
                found.append((line, values))
    return found


def start_wandb(project: str | None, run: Path, config: dict):
    """A run of the Weights & Biases project, if one is named, with an id that stays when it resumes.

    Until it has started, only the folder's wandb/ is written.
    """
    if not project:
        return None
    file = run / "wandb" / "id"
    try:
        import wandb

        if not file.exists():
            replace_text(file, f"{secrets.token_hex(8)}\n")
        about = {"name": run.name, "dir": str(run), "config": config, "resume": "allow"}
        return wandb.init(project=project, id=file.read_text(encoding="utf-8").strip(), **about)
    except Exception as error:  # not installed, not logged in, no network
        what = f"Weights & Biases does not start ({' '.join(str(error).split())[:200]})."
        raise UserError(what, "Run `pip install wandb` and `wandb login`, or leave --wandb out.") from error


# ------------------------------------------------------------------------------------------------------ printed lines
FIELDS = {  # of a progress line, in this order; other logged values are terms of the loss
    "network": "network {}",
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.3f}",
    "scale": "a {:.2f}",
    "shift": "b {:.2f}",
    "logit_scale": "scale {:.2f}",
    "temperature": "temperature {:.2f}",
    "u_image": "u image {:.3f}",
    "u_text": "u text {:.3f}",
    "u_part": "u part {:.3f}",
    "gradient_norm": "gradient {:.2f}",
    "clipped": "{:.0%} clipped",
    "skipped": "{} steps skipped (NaN or Inf)",
    "images_per_second": "{:.0f} images/s",
    "pairs_per_second": "{:.0f} pairs/s",
    "data_wait": "data {:.0%}",
    "tokens_per_second": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "memory": "{:.1f} GiB",
    "lr": "lr {:.1e}",
    "first_step": "first step {:.1f} s",
    "eta": "ETA {}",
}
SILENT = ("samples", "n_pseudo", "text_tokens", "is_best")
METRICS = {"rsum": "RSUM", "r_precision": "R-Precision"}  # that choose an epoch


def step_of(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def train_line(step: int, steps: int, values: dict[str, float]) -> str:
    # The first step may compile and fetch the first shards: it says little about the others.
    left_out = {*SILENT, "eta" if "first_step" in values else "", "" if values.get("skipped") else "skipped"}
    v = {name: value for name, value in values.items() if name not in left_out}
    v |= {"memory": v["memory"] / 2**30} if "memory" in v else {}
    v |= {"eta": timedelta(seconds=round(v["eta"]))} if "eta" in v else {}
    terms = ", ".join(f"{name} {value:.3f}" for name, value in v.items() if name not in FIELDS)
    fields = {name: text.format(v[name]) for name, text in FIELDS.items() if name in v}
    fields["loss"] = fields.get("loss", "every step was skipped") + f" ({terms})" * bool(terms)
    return " | ".join([step_of(step, steps), *fields.values()])


def evaluation_line(step: int, steps: int, values: dict[str, float]) -> str | None:
    """The line of an evaluation's values, whose keys may begin with the name of its set; None for other values."""
    name = next((f"{key.partition('/')[0]}: " for key in values if "/" in key), "")
    own = {key.rpartition("/")[2]: value for key, value in values.items()}
    words = next((told(own) for key, told in EVALUATED.items() if key in own), None)
    best = " | best so far" if values.get("is_best") else ""
    return words and f"{step_of(step, steps)} | {name}{words}{best}"


def zeroshot_words(values: dict[str, float]) -> str:
    return f"zero-shot top-1 {100 * values['zeroshot_top1']:.2f} %, top-5 {100 * values['zeroshot_top5']:.2f} %"


def composed_words(values: dict[str, float]) -> str:
    return f"validation R-Precision {values['r_precision']:.1f} (R@5, 10: {values['r5']:.1f} {values['r10']:.1f})"


def rsum_words(values: dict[str, float]) -> str:
    recalls = " ".join(f"{values[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 5, 10))
    loss = f"loss {values['validation_loss']:.3f}, " if "validation_loss" in values else ""
    weights = [f"{values[key]:g}" for key in ("tolerance_i2t", "tolerance_t2i") if key in values]
    by = f", by tolerance, λ {', '.join(weights)} chosen here" if weights else ""
    return f"validation {loss}RSUM {values['rsum']:.1f} (R@1, 5, 10 i→t, t→i: {recalls}{by})"


# Words on what an evaluation has found: of pairs and of composed queries (in percent), and of classes (shares).
EVALUATED = {"rsum": rsum_words, "r_precision": composed_words, "zeroshot_top1": zeroshot_words}


def headline(out: str, length: str, step: int, earlier: Path | None, **lines: str) -> str:
    lines["run"] = f"{out}, {length}" + (f", resumed at step {step} from {earlier}" if earlier else "")
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())
