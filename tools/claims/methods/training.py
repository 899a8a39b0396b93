"""One training of the comparison of methods: the commands that a user would type, in processes of their own.

`python -m finetune.run --resume` trains, so an interrupted training goes on from its last epoch, and
`python -m zeroshot.retrieval` measures. Both print into OUT/logs/NAME.log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from probemb.errors import UserError

HERE = Path(__file__).parent
START = HERE.parents[2] / "pretrain" / "configs" / "scenes.yaml"
START_EPOCHS, START_BATCH = 8, 64
POLL = 2.0  # seconds between two looks at a training's log
_STARTED: list[subprocess.Popen] = []  # commands of this process
NO_CUDA = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Training:
    """One training: a variant with a name, and a seed.

    method: of finetune; options: of its command line, name and value.
    """

    name: str
    seed: int
    method: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Form in which images are read, pixels or regions, and the settings of trainings that read them.

    config: the YAML; options: of finetune's command line; measuring: of zeroshot.retrieval's.
    """

    config: Path
    options: tuple[str, ...]
    measuring: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Data that all trainings share; pairs: training captions; regions: None where no variant reads them."""

    pixels: Inputs
    regions: Inputs | None
    pairs: int


def pretrain(shards: Path, vocabulary: Path, scenes: int, batch_size: int, out: Path) -> Path:
    """A run of the CLIP loss alone on drawn scenes, that towers start from; one that is there goes on or is finished.

    Raises UserError: the command failed.
    """
    run, log, batch_size = out / "start", out / "logs" / "start.log", min(START_BATCH, batch_size, scenes)
    command = [
        *("-m", "pretrain.run", "--config", str(START), "--objective", "clip", "--out", str(run)),
        *("--data.train", str(shards), "--model.vocabulary", str(vocabulary), "--no-evaluate.classes"),
        *("--epochs", str(START_EPOCHS), "--batch-size", str(batch_size), "--engine.threads", "1"),
        *("--optimizer.warmup_samples", str(scenes * START_EPOCHS // 16)),
        *(["--resume"] if run.exists() else []),
    ]
    with _start(command, log) as process:
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it saves, and ends
            raise
    _refuse(process.returncode, "the pretraining", log)
    return run


def train(inputs: Inputs, training: Training, name: str, out: Path, step_done: Callable[[], object]) -> float:
    """Train, calling `step_done` for every step; returns the seconds. Raises UserError: the command failed."""
    run = out / "runs" / name
    given = [f"--{option}={value}" for option, value in training.options]
    command = [
        *("-m", "finetune.run", "--config", str(inputs.config), "--method", training.method),
        *("--seed", str(training.seed), "--out", str(run), "--resume", *inputs.options, *given),
    ]
    log, began, done = out / "logs" / f"{name}.log", time.perf_counter(), steps_done(run)
    with _start(command, log) as process:
        try:
            while process.poll() is None:
                time.sleep(POLL)
                now = steps_done(run)
                for _ in range(now - done):
                    step_done()
                done = now
        except BaseException:
            process.terminate()  # it saves, and ends
            raise
    _refuse(process.returncode, f"{training.name}, seed {training.seed},", log)
    return time.perf_counter() - began


def measure(inputs: Inputs, training: Training, name: str, out: Path, rankings: Sequence[str]) -> dict:
    """The results.json of the test split. Raises UserError: the command failed."""
    results, log = out / "measured" / name, out / "logs" / f"{name}.log"
    command = [
        *("-m", "zeroshot.retrieval", "--model", str(out / "runs" / name), "--out", str(results)),
        *("--rankings", ",".join(rankings), "--erased", "0", *inputs.measuring),
    ]
    with _start(command, log) as process:
        process.wait()
    _refuse(process.returncode, f"{training.name}, seed {training.seed},", log)
    return json.loads((results / "results.json").read_text(encoding="utf-8"))


def validated(run: Path) -> list[float]:
    """Validation RSUM of every epoch."""
    return [line["rsum"] for line in _lines(run) if "rsum" in line]


def seconds_per_step(run: Path, batch_size: int) -> float | None:
    """Of the last epoch, from its log lines' speed; None without any."""
    speeds = [line["pairs_per_second"] for line in _lines(run) if line.get("pairs_per_second")]
    late = sorted(speeds[len(speeds) // 2 :])
    return batch_size / late[len(late) // 2] if late else None


def terminate() -> None:
    """Tell the started commands to save and end."""
    for process in _STARTED:
        process.terminate()


def _start(command: Sequence[str], log: Path) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **NO_CUDA},
        )  # fmt: skip
    _STARTED[:] = [*(one for one in _STARTED if one.poll() is None), process]
    return process


def _refuse(code: int, what: str, log: Path) -> None:
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = [line.strip() for line in lines[-2:]]  # what is wrong, and what to do
        raise UserError(
            f"{what} ended with code {code}: {' '.join(last)[:400]}",
            f"Read {log}; start again when it is mended: finished trainings are kept.",
        )


def _lines(run: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []  # not there yet, or its last line is being written


def steps_done(run: Path) -> int:
    """Step of a run's last line in its log; 0 for a run that has none."""
    return max((line.get("step", 0) for line in _lines(run)), default=0)
