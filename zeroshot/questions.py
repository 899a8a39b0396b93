"""The sets of queries that `zeroshot.composed` asks, and what the model's training had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from probemb.errors import UserError
from zeroshot.crops import ComposedConfig

if TYPE_CHECKING:
    import numpy as np

    from probemb.data.compositions import Compositions, Query
    from probemb.evaluation.composed import ComposedQueries

Combinations = Literal["seen", "unseen", "infeasible", "changes"]
PER_COMBINATION = 10  # queries; the paper has 10,000 for 1,000
FASHION_KS = (1, 10, 50)
NAMES = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r@50": "R@50", "r_precision": "R-P"}
MAX_CONFIG = 1 << 20  # bytes


@dataclass(frozen=True)
class Trained:
    """Settings of a run's composed queries from its `config.yaml`, or the defaults where there is no such file.

    Attributes:
        known: whether there is.
    """

    parts: int = 2
    setup: Literal["seen", "unseen"] = "seen"
    seed: int = 0
    lists: str | None = None
    known: bool = False


@dataclass(frozen=True)
class Questions:
    """One set of queries of k parts.

    Attributes:
        combinations: "seen" in the training, "unseen", "infeasible" (in no image, without a correct target), or
            "changes" of attributes.
        data: whose targets are asked for.
        number: of different combinations.
    """

    k: int
    combinations: Combinations
    data: Compositions
    queries: list[Query]
    number: int


@dataclass(frozen=True)
class Asked:
    """A set of queries and their embeddings."""

    questions: Questions
    found: ComposedQueries

    @property
    def ks(self) -> tuple[int, ...]:
        """K of R@K."""
        from probemb.evaluation.composed import KS

        return FASHION_KS if self.changes else KS

    @property
    def changes(self) -> bool:
        """True if queries change an attribute of an image, which is then no answer to them."""
        return self.questions.combinations == "changes"


def training_of(model: str) -> Trained:
    """The training of a run, or of a model in a run's folder. Raises UserError: its config.yaml is damaged."""
    path = Path(model)
    file = next((one for one in (path / "config.yaml", path.parent / "config.yaml") if one.is_file()), None)
    if not path.exists() or file is None or file.stat().st_size > MAX_CONFIG:
        return Trained()
    try:
        compose = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("compose")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        raise UserError(f"{file} cannot be read.", "Name the model folder itself, or restore the file.") from None
    if not isinstance(compose, dict):
        return Trained()
    found = replace(Trained(known=True), **{key: compose[key] for key in _TYPES if compose.get(key) is not None})
    wrong = [key for key, kind in _TYPES.items() if type(getattr(found, key)) not in (kind, type(None))]
    if wrong or found.setup not in ("seen", "unseen"):
        raise UserError(f"{file} has no usable compose.{(wrong or ['setup'])[0]}.", "Restore the run's file.")
    return found


_TYPES = {"parts": int, "setup": str, "seed": int, "lists": str}


def with_training(config: ComposedConfig, trained: Trained) -> ComposedConfig:
    """Options that were left open as the training had them."""
    lists = config.lists if config.lists is not None else trained.lists
    return replace(
        config,
        k=str(trained.parts) if config.k is None else config.k,
        setup=trained.setup if config.setup == "auto" else config.setup,
        seed=trained.seed if config.seed is None else config.seed,
        lists=lists,
    )


def parts_asked(k: str) -> list[int]:
    """The numbers of "2,3,4", ascending. Raises UserError."""
    from probemb.data.compositions.tuples import MAX_K

    words = [word.strip() for word in k.split(",")]
    numbers = sorted({int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 4})
    if not all(word.isascii() and word.isdecimal() for word in words) or not numbers:
        raise UserError(f"--k is '{k[:100]}'.", "Give numbers of parts such as 2 or 2,3,4.")
    if numbers[0] < 2 or numbers[-1] > MAX_K or len(numbers) < len(set(words)):
        raise UserError(f"--k is '{k[:100]}'.", f"Queries have 2 to {MAX_K} parts.")
    return numbers


def find_questions(config: ComposedConfig, trained: Trained) -> list[Questions]:
    """All sets, of which the same images are the gallery; options are those of `with_training`.

    Raises UserError: no such data, or too little of it; --k for data that has no combinations.
    """
    from probemb.data.compositions import find_compositions

    where = {"images": config.images, "lists": config.lists, "sizes": config.sizes, "seed": config.seed}
    result = []
    for k in parts_asked(config.k):
        setup = config.setup if k == trained.parts else "seen"  # queries of another length are new to both setups
        data = find_compositions(config.data, config.split, k, setup=setup, **where)
        if not len(data.tuples):
            if config.k != "2":
                raise UserError(f"{config.data} has changes of an attribute, and --k is {config.k}.", "Leave --k out.")
            queries = data.queries or data.sampled_queries(config.queries, config.seed)
            return [Questions(2, "changes", data, queries, len({query.concepts for query in queries}))]
        if k != trained.parts:
            result.append(_asked(config, data, "unseen", data.tuples, data.queries))
        elif setup == "unseen":
            training = find_compositions(config.data, "train", k, setup=setup, **where)
            result.append(_asked(config, data, "seen", _answerable(data, training.tuples)))
            result.append(_asked(config, data, "unseen", data.tuples, data.queries))
        else:
            result.append(_asked(config, data, "seen", data.tuples, data.queries))
            result.append(_asked(config, data, "unseen", _answerable(data, data.unseen)))
        result.append(_asked(config, data, "infeasible", data.infeasible))
    return [one for one in result if one.queries]


def training_counts(config: ComposedConfig, data: Compositions) -> list[int]:
    """Number of images of the training split that have each concept of `data`."""
    from probemb.data.compositions import find_compositions

    if not len(data.tuples):
        return []
    where = {"images": config.images, "lists": config.lists, "sizes": config.sizes, "seed": config.seed}
    training = find_compositions(config.data, "train", data.k, setup=config.setup, **where)
    number = {concept: i for i, concept in enumerate(training.concepts)}
    return [len(training.targets([number[concept]])) for concept in data.concepts]


def _asked(
    config: ComposedConfig, data: Compositions, combinations: Combinations, tuples: np.ndarray,
    published: list[Query] | None = None,
) -> Questions:  # fmt: skip
    number = min(config.queries, PER_COMBINATION * len(tuples))
    queries = published or data.sampled_queries(number, config.seed, tuples)
    return Questions(data.k, combinations, data, queries, len({query.concepts for query in queries}))


def _answerable(data: Compositions, tuples: np.ndarray) -> np.ndarray:
    """Combinations that this split has targets and image queries of."""
    import numpy as np

    usable = [bool(len(data.targets(row))) and all(len(data.crops[one]) for one in row) for row in tuples]
    return tuples[np.array(usable, dtype=bool)]


def feasibility_sets(asked: Sequence[Asked]) -> tuple[Asked | None, dict[str, Asked]]:
    """The infeasible set, if there is one, and the feasible sets of as many parts by name."""
    never = next((one for one in asked if one.questions.combinations == "infeasible"), None)
    if never is None:
        return None, {}
    same = (one for one in asked if one is not never and one.questions.k == never.questions.k)
    return never, {one.questions.combinations: one for one in same}
