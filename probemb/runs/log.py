"""The log of a run: metrics.jsonl, TensorBoard, and optionally Weights & Biases."""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from probemb.errors import UserError
from probemb.files import replace_text
from probemb.runs.log_file import LogFile, Warnings


class RunLog:
    """Writes to a run folder; only rank 0 has one. What cannot be written is told once, and the run continues.

    Args:
        run: the run folder.
        step: the step that the run resumes from; later entries of an interrupted attempt are dropped.
        wandb: of `start_wandb`.
    """

    def __init__(self, run: Path, step: int, wandb=None):
        drop_lines_after(run / "metrics.jsonl", step)
        self.warnings = Warnings()
        self.file = LogFile(run / "metrics.jsonl", self.warnings)
        self.board = Board(run / "tensorboard", step + 1, self.warnings)
        self.wandb = wandb

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write a line of metrics.jsonl and a point of every curve."""
        self.file.write(f"{json.dumps({'step': step, 'time': round(time.time(), 3), **values})}\n".encode())
        self.board.write(step, values)
        if self.wandb:
            try:
                self.wandb.log(values, step=step)
            except Exception as error:  # any: the run must not depend on it
                self.warnings.tell(Path("wandb"), error)

    def close(self) -> None:
        """Close the files; never raises."""
        self.file.close()
        self.board.close()
        if self.wandb:
            try:
                self.wandb.finish()
            except Exception as error:
                self.warnings.tell(Path("wandb"), error)


class Board:
    """Curves for TensorBoard, written at once; SummaryWriter's thread would die of a full disk and block its callers.

    Args:
        folder: of the event files.
        step: points of earlier files from here on are hidden.
    """

    def __init__(self, folder: Path, step: int, warnings: Warnings):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = LogFile(folder / name, warnings)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._add(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to every curve."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=points))

    def _add(self, **fields) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._file.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of a jsonl file, if it exists, that an interrupted attempt wrote after a step."""
    if not path.is_file():
        return
    replace_text(path, "".join(f"{line}\n" for line, values in logged_lines(path) if values["step"] <= step))


def logged_lines(path: Path) -> list[tuple[str, dict]]:
    """The whole lines of a run's jsonl file, each with what it says; none if there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):  # the last line of a killed run may be cut
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                found.append((line, values))
    return found


def start_wandb(project: str | None, run: Path, config: dict):
    """A run of the Weights & Biases project, if one is named. Raises UserError, and has written nothing then."""
    if not project:
        return None
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "wandb was asked for and is not installed.", "Run `pip install wandb`, or leave --wandb out."
        ) from error
    is_new = not (run / "wandb").exists()
    try:
        return wandb.init(
            project=project, name=run.name, dir=str(run), config=config, resume="allow", id=_wandb_id(run)
        )
    except wandb.Error as error:
        if is_new:
            shutil.rmtree(run / "wandb", ignore_errors=True)
        raise UserError(
            f"Weights & Biases does not start ({' '.join(str(error).split())[:200]}).",
            "Run `wandb login`, or leave --wandb out.",
        ) from error


def _wandb_id(run: Path) -> str:
    """An id that stays when a run resumes, and differs between runs of the same name."""
    path = run / "wandb" / "id"
    if not path.exists():
        replace_text(path, f"{secrets.token_hex(8)}\n")
    return path.read_text(encoding="utf-8").strip()


def duration(seconds: float) -> str:
    """h:mm:ss, with days where there are any."""
    return str(timedelta(seconds=round(seconds)))


NOT_TERMS = (
    "samples", "epoch", "network", "loss", "lr", "skipped", "data_wait", "eta", "gradient_norm", "scale", "shift",
    "temperature", "logit_scale", "n_pseudo", "u_image", "u_text", "u_part", "clipped", "text_tokens", "memory", "mfu",
    "first_step",
)  # fmt: skip
SHORT = {"pseudo_positive": "pp"}


def step_of(step: int, steps: int) -> str:
    """The head of every progress line."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def train_line(step: int, steps: int, v: dict[str, float], terms: Sequence[str] | None = None) -> str:
    """The progress line of a step. `v` as in metrics.jsonl; `terms` names the parts of the loss to show, None shows
    all.
    """
    unit = next(name for name in v if name.endswith("_per_second")).removesuffix("_per_second")
    if terms is None:
        terms = [name for name in v if name not in NOT_TERMS and not name.endswith("_per_second")]
    parts = [f"{SHORT.get(name, name)} {v[name]:.3f}" for name in terms if name in v]
    skipped = f"{v['skipped']} steps skipped (NaN or Inf)" if v.get("skipped") else ""
    gradient = f"gradient {v['gradient_norm']:.2f}" if "gradient_norm" in v else ""
    gradient += f" ({100 * v['clipped']:.0f} % clipped)" if "clipped" in v else ""
    fields = [
        step_of(step, steps),
        f"network {v['network']}" if "network" in v else "",
        f"epoch {v['epoch']:.2f}" if "epoch" in v else "",
        f"loss {v['loss']:.3f}" + (f" ({', '.join(parts)})" if parts else "")
        if "loss" in v
        else "every step since the last line was skipped",
        f"a {v['scale']:.2f} b {v['shift']:.2f}" if "scale" in v else "",
        f"scale {v['logit_scale']:.2f}" if "logit_scale" in v and "scale" not in v else "",
        f"temperature {v['temperature']:.2f}" if "temperature" in v else "",
        f"u image {v['u_image']:.3f} text {v['u_text']:.3f}" if "u_text" in v else "",
        f"u image {v['u_image']:.3f} part {v['u_part']:.3f}" if "u_part" in v else "",
        gradient,
        skipped,
        f"{v[f'{unit}_per_second']:.0f} {unit}/s, data {100 * v['data_wait']:.0f} %",
        f"{v['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in v else "",
        f"MFU {100 * v['mfu']:.1f} %" if "mfu" in v else "",
        f"{v['memory'] / 2**30:.1f} GiB" if "memory" in v else "",
        f"lr {v['lr']:.1e}",
        # The first step may compile and fetch the first shards: it says little about the others.
        f"first step {v['first_step']:.1f} s" if "first_step" in v else f"ETA {duration(v['eta'])}",
    ]
    return " | ".join(field for field in fields if field)


METRICS = {"rsum": "RSUM", "r_precision": "R-Precision"}  # that choose an epoch


def composed_words(values: dict[str, float]) -> str:
    """R-Precision and recalls of composed queries in percent, for a progress line."""
    marked = " (best)" if values.get("is_best") else ""
    return f"R-Precision {values['r_precision']:.1f}{marked} (R@5, 10: {values['r5']:.1f} {values['r10']:.1f})"


def rsum_words(values: dict[str, float]) -> str:
    """RSUM and recalls in percent, for a progress line."""
    recalls = " ".join(f"{values[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 5, 10))
    marked = " (best)" if values.get("is_best") else ""
    weights = [f"{values[key]:g}" for key in ("tolerance_i2t", "tolerance_t2i") if key in values]
    by = f", by tolerance, λ {', '.join(weights)} chosen here" if weights else ""
    return f"RSUM {values['rsum']:.1f}{marked} (R@1, 5, 10 i→t, t→i: {recalls}{by})"


def headline(out: str, length: str, step: int, earlier: Path | None, **lines: str) -> str:
    """The lines before the first step: the given ones, and the run's folder, length and start."""
    lines["run"] = f"{out}, {length}" + (f", resumed at step {step} from {earlier}" if earlier else "")
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def count(n: int, what: str) -> str:
    """ "1 epoch", "2 epochs"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
