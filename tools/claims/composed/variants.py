"""The compared methods of composed retrieval: what each is called, and the options that were chosen on validation.

The paper trains all methods with one learning rate (2e-4, Adam). Here each has its own, and MPC's similarities a
temperature, as its means have unit length; see `study.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.methods.registry import METHODS
from probemb.errors import UserError, nearest

SEEN, UNSEEN = "seen", "unseen"  # setups, and kinds of combinations


@dataclass(frozen=True)
class Training:
    """One training: a variant with a name, and a seed, which decides examples, their order and random weights.

    method: of finetune; parts: concepts in a query that it is trained on; options: of its loss; chosen: learning rate,
    and temperature where there is one; setup: "unseen" has a few pairs of its own to train on and others in the test.
    """

    name: str
    seed: int
    method: str
    parts: int = 2
    options: tuple[tuple[str, str], ...] = ()
    chosen: tuple[tuple[str, float], ...] = ()
    setup: str = SEEN

    @property
    def values(self) -> dict[str, float]:
        """`chosen` by name."""
        return dict(self.chosen)

    @property
    def probabilistic(self) -> bool:
        return METHODS[self.method].probabilistic


@dataclass(frozen=True)
class Variant:
    """A method with its options. title: in tables; method, parts, setup: as those of `Training`."""

    title: str
    method: str
    options: dict[str, str] = field(default_factory=dict)
    parts: int = 2
    setup: str = SEEN


THREE, APART = " k=3", " unseen"
VARIANTS: dict[str, Variant] = {
    "mpc": Variant("MPC", "mpc"),
    "mpc expected": Variant("MPC, expected similarity", "mpc", {"similarity": "expected"}),
    "mpc code": Variant("MPC, the public code's similarity", "mpc", {"similarity": "code"}),
    "mpc-mlp": Variant("MPC without Eq. 2", "mpc-mlp"),
    "mpc-cosine": Variant("MPC without Eq. 6", "mpc-cosine"),
    "pcme-addition": Variant("PCME + addition", "pcme-addition"),
    "tirg": Variant("TIRG", "tirg"),
    "mrn": Variant("MRN", "mrn"),
    "film": Variant("FiLM", "film"),
    "relationship": Variant("Relationship", "relationship"),
}
BEST_RIVALS = ("pcme-addition", "tirg", "mrn")  # those that the paper follows into its Tables 2 and 3 and Fig. 4 and 5
VARIANTS |= {
    name + THREE: Variant(f"{VARIANTS[name].title}, trained on three", VARIANTS[name].method, parts=3)
    for name in ("mpc", *BEST_RIVALS)
}
VARIANTS |= {
    name + APART: Variant(f"{VARIANTS[name].title}, trained on few pairs", VARIANTS[name].method, setup=UNSEEN)
    for name in ("mpc", *BEST_RIVALS)
}
# Chosen on the validation images of drawn scenes, see `study.py`. Photographs take the same.
CHOSEN: dict[str, dict[str, float]] = {
    "mpc": {"lr": 3e-3, "temperature": 16.0},
    "mpc expected": {"lr": 3e-3, "temperature": 64.0},
    "mpc code": {"lr": 3e-3, "temperature": 64.0},
    "mpc-mlp": {"lr": 3e-3, "temperature": 1.0},
    "mpc-cosine": {"lr": 1e-2, "temperature": 0.0625},
    "pcme-addition": {"lr": 1e-2, "temperature": 0.015625},
    "tirg": {"lr": 1e-2},
    "mrn": {"lr": 3e-3},
    "film": {"lr": 1e-2},
    "relationship": {"lr": 1e-2},
}
LEARNING_RATES, FACTORS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (0.25, 4.0)  # and of temperatures


def neighbours(values: dict[str, float]) -> list[tuple[str, float]]:
    """Settings to try around chosen values: the learning rate, the next ones, and other temperatures."""
    at = LEARNING_RATES.index(values["lr"])
    tried = [("lr", lr) for lr in LEARNING_RATES[max(at - 1, 0) : at + 2]]
    return tried + [("temperature", factor * values["temperature"]) for factor in FACTORS if "temperature" in values]


def training_of(name: str, seed: int) -> Training:
    """The training of a variant."""
    variant = VARIANTS[name]
    chosen = tuple(CHOSEN[name.removesuffix(THREE).removesuffix(APART)].items())
    return Training(name, seed, variant.method, variant.parts, tuple(variant.options.items()), chosen, variant.setup)


def composed_variants(text: str) -> list[str]:
    """Keys of VARIANTS: all of them for "composed", or those that a list with commas names; none for other methods.

    Raises UserError: one name is of them and another is not.
    """
    if text == "composed":
        return list(VARIANTS)
    names = [part.strip() for part in text.split(",")]
    found = [[key for key, variant in VARIANTS.items() if name in (key, variant.method)] for name in names]
    if not any(found):
        return []
    for name, keys in zip(names, found):
        if not keys:
            what = f"There is no composed method '{name}' to compare.{nearest(name, VARIANTS)}"
            raise UserError(what, f"Name composed, or some of {', '.join(VARIANTS)}.")
    return list(dict.fromkeys(key for keys in found for key in keys))
