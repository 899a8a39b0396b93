"""The sets that a run evaluates on: names in the log, what is measured on each, and the evaluations themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.cli.named_paths import NamedPath, named_paths
from probemb.errors import UserError, nearest
from probemb.runs.log import logged_lines

if TYPE_CHECKING:
    from pretrain.config import Config, Evaluate

RETRIEVAL = ("validation_loss", "rsum", *(f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)))
ZERO_SHOT = ("zeroshot_top1", "zeroshot_top5")


class Named(NamedTuple):
    """An evaluation of one set; its values are logged under the set's name.

    Args:
        name: NAME in NAME/rsum, …; empty for rsum alone.
        measure: engine, and `meet` of `Evaluator` -> values.
    """

    name: str
    measure: Callable[..., dict[str, float]]

    def __call__(self, engine, meet: Callable[[], object]) -> dict[str, float]:
        """The values, by NAME/METRIC; collective."""
        return {f"{self.name}/{key}" if self.name else key: value for key, value in self.measure(engine, meet).items()}


def split_set(values: dict[str, float]) -> tuple[str, dict[str, float]]:
    """A set's name, empty for none, and its values without it; see `Named`."""
    name = next((key.partition("/")[0] for key in values if "/" in key), "")
    return name, {key.removeprefix(f"{name}/"): value for key, value in values.items()}


def pair_sets(config: Evaluate) -> list[tuple[NamedPath, str | None]]:
    """Every set of pairs, and its split. Raises UserError: names or splits do not fit."""
    found, splits = named_paths(config.pairs, "evaluate.pairs"), config.pairs_split
    splits = [splits] * len(found) if splits is None or isinstance(splits, str) else splits
    if len(splits) != len(found):
        raise UserError(
            f"There are {len(found)} evaluate.pairs and {len(splits)} evaluate.pairs_split.",
            "Give one split for all of them, or one for each.",
        )
    return list(zip(found, splits))


def class_sets(config: Evaluate) -> list[NamedPath]:
    """Every set of labelled images. Raises UserError: names do not fit."""
    return named_paths(config.classes, "evaluate.classes")


def logged_keys(config: Evaluate) -> list[list[str]]:
    """Names that each evaluation logs, in the order of `make_evaluators`. Raises UserError: the sets do not fit."""
    sets = [(one.name, RETRIEVAL) for one, _ in pair_sets(config)]
    sets += [(one.name, ZERO_SHOT) for one in class_sets(config)]
    return [[f"{name}/{key}" if name else key for key in keys] for name, keys in sets]


def metrics(config: Evaluate) -> list[str]:
    """Everything that the evaluations log. Raises UserError: the sets do not fit."""
    return [key for keys in logged_keys(config) for key in keys]


def left_out(config: Evaluate, rows: list[dict]) -> list[int]:
    """The numbers of the evaluations, in the order of `make_evaluators`, whose values are not in rows of the log."""
    seen = {key for row in rows for key in row}
    return [number for number, keys in enumerate(logged_keys(config)) if not seen.intersection(keys)]


def logged_evaluations(run: Path, step: int) -> list[dict]:
    """The lines of a run's log on the evaluations of a step."""
    rows = [values for _, values in logged_lines(run / "metrics.jsonl") if values["step"] == step]
    return [values for values in rows if split_set(values)[1].keys() & {*RETRIEVAL, *ZERO_SHOT}]


def lower_is_better(metric: str) -> bool:
    """Of a metric by its name in the log."""
    return metric.rpartition("/")[2] == "validation_loss"


def check_evaluation(config: Evaluate) -> None:
    """Raises UserError: the sets do not fit, or the best is by something that is not measured."""
    known, best = metrics(config), config.best
    if best is None:
        return
    if not known:
        raise UserError(f"evaluate.best is {best}, and nothing is evaluated.", "Name evaluate.pairs or classes.")
    if best not in known:
        raise UserError(
            f"evaluate.best is {best}, which no evaluation logs.{nearest(best, known)}", f"Choose {', '.join(known)}."
        )
    if not config.every_samples:
        raise UserError(
            f"evaluate.best is {best}, and the run is evaluated at its end only.", "Set evaluate.every_samples."
        )


def make_evaluators(config: Config, transform, tokenizer, device, rank: int, world_size: int) -> list[Named]:
    """The evaluations while training, called with the engine."""
    where, found = (transform, tokenizer, device, rank, world_size), []
    for (name, path), split in pair_sets(config.evaluate):
        from pretrain.validation import Validator

        found.append(Named(name, Validator(config, path, split, *where)))
    for name, path in class_sets(config.evaluate):
        from pretrain.evaluation import Evaluator

        found.append(Named(name, Evaluator(config, path, *where)))
    return found
