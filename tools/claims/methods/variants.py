"""The compared variants of methods: what each is called, where it is from, and what its configuration leaves open.

The rest is `finetune/configs/METHOD.yaml` and the YAML of the world. Learning rates and margins are those of the
other claims, or of the papers; nothing here was chosen on test images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from finetune.methods.registry import METHODS
from probemb.errors import UserError, nearest
from tools.claims.methods.training import Training


@dataclass(frozen=True)
class Variant:
    """A method with its options.

    title: in tables; method: of finetune; paper: where it is from; options: of finetune's command line; step: what
    a step costs, in steps of VSE∞, for the time that is left.
    """

    title: str
    method: str
    paper: str
    options: dict[str, str] = field(default_factory=dict)
    step: float = 1.0

    @property
    def regions(self) -> bool:
        """True if it reads precomputed regions in place of pixels."""
        return METHODS[self.method].over_regions


RATE = " lr "  # before the learning rate, in names of trainings
PAPERS = {
    "pcmepp": "PCME++ and its rivals",
    "pcme": "PCME and its baselines",
    "prob": "Probabilistic VSE++",
    "jwae": "SCAN and jWAE",
}
SCALE = {"loss.scale": "13", "loss.shift": "13"}
MATCH = {**SCALE, "loss.pseudo_positive": "0"}  # from random heads what is close is no match yet
WITH_CLIP = {**MATCH, "loss.clip": "0.3"}
CAPTIONS = {"loss.hidden": "256", "loss.word_width": "100"}  # decoders of half the width of the default, for time
MLP = {**CAPTIONS, "model.head": "mlp"}  # encoders of two layers
# The paper's weight 1 is for mean word vectors. Its image features are fixed: a tower that trains makes them alike if
# no pair is told from others (on scenes the images' error falls from 6.4 to 0.3, and RSUM stays at 21).
SAYS_WORDS = {**MLP, "loss.text_weight": "0.005", "model.lock_image": "true"}
# Towers from random weights collapse with the hardest negatives alone; VSE++ is trained with them all the same.
WARM = {"loss.warmup_epochs": "1"}
# The margin of all others; with its own of 0.1 PVSE, K = 1, is 11 points of validation RSUM lower on Flickr8k.
PIE = {**WARM, "model.head": "pie", "loss.margin": "0.2"}
SCAN = {**WARM, "model.head": "average"}
VSRN = {"loss.warmup_epochs": "2"}  # after one its images fall together again: their graph and GRU are random too
PROB = {**WARM, "model.n_unc_layers": "[0, 1]"}  # the GRU again for the variance, as in the paper
VARIANTS: dict[str, Variant] = {
    "infonce": Variant("InfoNCE", "infonce", "pcmepp", {"loss.temperature": "14"}),
    "vse": Variant("VSE∞", "vse", "pcmepp"),
    "pcmepp-mu": Variant("match loss, μ only", "pcmepp-mu", "pcmepp", MATCH),
    "pcmepp-mu clip": Variant("match and CLIP loss, μ only", "pcmepp-mu", "pcmepp", WITH_CLIP),
    "pcmepp": Variant("match loss, CSD", "pcmepp", "pcmepp", MATCH),
    "pcmepp-clip": Variant("match and CLIP loss, CSD", "pcmepp-clip", "pcmepp", {**SCALE, "loss.clip": "0.3"}),
    "pcme": Variant("PCME", "pcme", "pcme", SCALE, step=1.5),
    "vse0": Variant("VSE0", "vse0", "pcme"),
    "vsepp": Variant("VSE++", "vsepp", "pcme"),
    "order": Variant("order embeddings", "order", "pcme"),
    "pvse K=1": Variant("PVSE, K = 1", "pvse", "pcme", {**PIE, "loss.embeddings": "1"}, step=1.5),
    "pvse K=2": Variant("PVSE, K = 2", "pvse", "pcme", {**PIE, "loss.embeddings": "2"}, step=1.7),
    "pvse K=4": Variant("PVSE, K = 4", "pvse", "pcme", {**PIE, "loss.embeddings": "4"}, step=1.9),
    "prob-vsepp": Variant("VSE++, 2-Wasserstein", "prob-vsepp", "prob", PROB, step=1.8),
    "prob-vsepp min-KL": Variant(
        "VSE++, min-KL", "prob-vsepp", "prob", {**PROB, "loss.similarity": "min-kl"}, step=1.8
    ),
    "prob-vsepp KL": Variant("VSE++, KL", "prob-vsepp", "prob", {**PROB, "loss.similarity": "kl"}, step=1.8),
    "vsrn": Variant("VSRN", "vsrn", "prob", {**VSRN, **CAPTIONS}, step=7.4),
    "prob-vsrn": Variant("VSRN, 2-Wasserstein", "prob-vsrn", "prob", {**VSRN, "model.n_unc_layers": "1"}, step=1.9),
    "scan t2i": Variant("SCAN, t-i", "scan", "jwae", {**SCAN, "loss.direction": "t2i"}, step=1.8),
    "scan i2t": Variant("SCAN, i-t", "scan", "jwae", {**SCAN, "loss.direction": "i2t"}, step=1.8),
    "jwae-scan": Variant("jWAE-SCAN, t-i", "jwae-scan", "jwae", {**SCAN, **CAPTIONS}, step=6.8),
    "jwae-mh": Variant("jWAE-MH", "jwae-mh", "jwae", MLP, step=2.4),
    "vae-mh": Variant("VAE-MH", "vae-mh", "jwae", MLP, step=2.5),
    "mse": Variant("MSE", "mse", "jwae", SAYS_WORDS, step=2.5),
    "jwae-mse": Variant("jWAE-MSE", "jwae-mse", "jwae", SAYS_WORDS, step=2.5),
    "mmd-mse": Variant("MMD-MSE", "mmd-mse", "jwae", SAYS_WORDS, step=2.5),
}


def chosen_variants(text: str) -> list[str]:
    """Keys of VARIANTS: all, or those of methods or variants that a list with commas names. Raises UserError."""
    if text == "all":
        return list(VARIANTS)
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        keys = [key for key, variant in VARIANTS.items() if name in (key, variant.method)]
        if not keys:
            known = list(dict.fromkeys([*VARIANTS, *(one.method for one in VARIANTS.values())]))
            what = f"There is no method '{name}' to compare.{nearest(name, [*known, 'composed'])}"
            raise UserError(what, f"Name all, composed (MPC and its rivals), or some of {', '.join(known)}.")
        found += keys
    return list(dict.fromkeys(found))


def training_of(name: str, seed: int) -> Training:
    """The training of a variant."""
    variant = VARIANTS[name]
    return Training(name, seed, variant.method, tuple(variant.options.items()))


def at_rate(name: str, seed: int, lr: float) -> Training:
    """The same at another learning rate."""
    training = training_of(name, seed)
    return replace(
        training, name=f"choose {name}{RATE}{lr:g}", options=(*training.options, ("optimizer.lr", f"{lr:g}"))
    )


def variant_of(training: Training) -> str:
    """The key of VARIANTS that a training is of."""
    return training.name.removeprefix("choose ").partition(RATE)[0]


def rankings_of(name: str) -> list[str]:
    """The rankings measured: the method's own first, then by CSD and the means where there are such."""
    variant = VARIANTS[name]
    method = METHODS[variant.method]
    if variant.options.get("loss.embeddings") == "1":
        return ["mean"]
    if method.ranking in ("multi-instance", "attention"):
        return [method.ranking]
    own = method.ranking if method.probabilistic or method.ranking != "csd" else "mean"
    if hasattr(method.Options, "similarity"):  # the ranking is what the loss compares
        own = variant.options.get("loss.similarity", method.Options.similarity)
    return list(dict.fromkeys([own, *(["csd"] if method.probabilistic else []), "mean"]))
