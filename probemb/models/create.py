"""A model from a name, random or from pretrained weights.

model = create_model("ViT-B-16", n_unc_layers=2)        # CLIP's own pooling, D = 512, as in pretraining
model = create_model("ViT-B-32-quickgelu", head="gpo", pretrained="openai", init_scale=5, init_shift=5)  # COCO
model = create_model("ViT-B-16", head="gpo", pretrained="runs/x")              # from a run of `pretrain`
image = model.encode_image(pixels)                      # Gaussian, (B, D)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from open_clip.transform import PreprocessCfg
from torch import nn

from probemb.data.words import count_words, find_vocabulary, frequent_words, read_vectors, read_vocabulary
from probemb.errors import UserError
from probemb.models.architectures import (
    architecture,
    bidirectional_text,
    build_stock,
    check_uncertainty_token,
    is_open_clip,
    read_architecture,
    reads_words,
    tower_kind,
)
from probemb.models.dual_encoder import POOLING, DualEncoder, per_tower, plain
from probemb.models.formats.open_clip_folder import OpenClipFiles, starting_point
from probemb.models.heads import check_head, check_uncertainty, make_covariance
from probemb.models.hub import load_model, open_clip_files, read_config
from probemb.models.pretrained import fill_from_model, fill_stock, find_pretrained, is_saved_model

GPO_EMBED_DIM = 1024  # PCME++ §B.2
LOGIT_BIAS = -10.0  # SigLIP's
OWN_DIM = ("clip", "mlp", "average")  # heads of which the architecture says D


@dataclass(frozen=True)
class ModelOptions:
    """Options of `create_model`.

    Args:
        embed_dim: D; None for the configuration's own (heads "clip", "mlp", "average") or 1024 ("gpo", "pie").
        n_unc_layers: blocks (of a transformer) or stages (of a CNN) of the uncertainty branch, 0 to the tower's number;
            two numbers for image and text. With 0 only the head is its own. None for 1, or for 0 in a point model,
            which has no such branch.
        head: a kind of `probemb.models.heads`: "clip" (the tower's own pooling), "gpo" (all tokens), "pie" (pooling
            and attention; several embeddings).
        pretrained: a weight tag of open_clip, a file with open_clip weights (.safetensors, .pt), or a folder or hub
            repository in open_clip's layout (`formats/open_clip_folder.py`). They fill the trunk and the mean branch;
            the uncertainty branch starts from random weights (PCME++ §3.3). Or whatever
            `load_model` reads: a run, a folder that `save_model` wrote, a hub name; `fill_from_model` says what is
            taken from there. In every case a and b start from `init_scale` and `init_shift`, if these are numbers.
        image_size: pixels, if not the configuration's; position embeddings are resized.
        grad_checkpointing: trade time for memory in all blocks.
        uncertainty_bias: whether the log-variance heads have a bias; the published pretraining weights have none.
        init_scale, init_shift: a and b of the match probability; 1, 1 in pretraining, 5, 5 on COCO; None for those of
            the run in `pretrained`, if it has match probabilities, else 5.
        match: "distance": a and b are parameters, of CSD; "samples": they are of PCME's sampled form; "cosine": the
            inverse temperature and logit_bias are parameters, as in SigLIP and ProLIP, see `DualEncoder.match_scalars`.
            Then init_scale and init_shift have no use. "none": the loss trains neither, so that the model has no match
            probability.
        init_logit_scale, init_logit_bias: exp(logit_scale) and, where match is "cosine", logit_bias, such as 10, -10;
            None for those of `pretrained`, or of the architecture (then a bias of -10 if it has none).
        max_logit_scale: ceiling of exp(logit_scale), None for none.
        temperature_trained: whether the loss trains the inverse temperature.
        objective: the name of the loss that trains the model, saved with it for people.
        probabilistic: False for a point model: no uncertainty branch and no head for it, and every log_var is
            POINT_LOG_VAR, so that ranking by CSD is ranking by cosine and all that reads a Gaussian still works.
        n_embeddings: K embeddings of every item, for heads that give several.
        covariance: "ellipsoidal", "spherical-mean" (the mean of the predicted variances, in every dimension) or
            "spherical" (one predicted value).
        log_var_range: bounds of the predicted log-variances, such as (log 0.1, log 10); None for none.
        log_var_start: where the log-variances start; None for −log D. ProLIP's is -10.
        ranking: that the model is trained for, a name of `probemb.evaluation.rankings`.
        attention: fields of `CrossAttention`, of a model that is ranked by it.
        composer: a name of `probemb.models.composers`, of a model that makes one embedding of several.
        composed_ranking: by which its compositions are trained to rank, "cosine" or "density".
        vocabulary: words, or a vocabulary file, of an architecture whose text tower reads words; None for that of the
            run in `pretrained`.
        uncertainty: what the log-variance is read from, see `heads.HeadConfig`: "branch", "token" or "prolip-code".
        unit_features: whether head "clip" reads it from features of unit length (probabilistic VSE++).
            With a token, a new model's text tower is ProLIP's: not causal, with a class token. Weights keep the text
            tower that they were trained with.
        image_weights: of an image tower from timm: "timm" for the model's default weights, another of its tags, or a
            file (.safetensors, .pth) with a state dict of timm's; the preprocessing is then the weights' own.
        crop_pct: side of the centre crop of evaluation, over the shorter side that images are resized to before, as
            timm calls it: 0.875 for 224 of 256. None for that of `pretrained`, or 1.
        batch_norm: statistics that batch norms normalise by in training: "batch" (of all ranks, which update the stored
            ones), "frozen" (the stored ones), or "auto": batch in a tower that starts from random weights, frozen in a
            pretrained one, its uncertainty branch included.
    """

    embed_dim: int | None = None
    n_unc_layers: int | tuple[int, int] | None = None
    head: str = "clip"
    pretrained: str | None = None
    image_size: int | None = None
    grad_checkpointing: bool = False
    uncertainty_bias: bool = True
    init_scale: float | None = 1.0
    init_shift: float | None = 1.0
    match: Literal["distance", "samples", "cosine", "none"] = "distance"
    init_logit_scale: float | None = None
    init_logit_bias: float | None = None
    max_logit_scale: float | None = 100.0
    temperature_trained: bool = True
    objective: str | None = None
    probabilistic: bool = True
    n_embeddings: int = 1
    covariance: str = "ellipsoidal"
    log_var_range: tuple[float, float] | None = None
    log_var_start: float | None = None
    ranking: str = "csd"
    attention: dict | None = None
    composer: str | None = None
    composed_ranking: Literal["cosine", "density"] = "cosine"
    vocabulary: str | Path | Sequence[str] | None = None
    image_weights: str | None = None
    crop_pct: float | None = None
    uncertainty: str = "branch"
    unit_features: bool = False
    batch_norm: Literal["auto", "batch", "frozen"] = "auto"

    @property
    def branch_layers(self) -> int | tuple[int, int]:
        """n_unc_layers, or its default. Raises UserError: a branch of a point model, or beside an uncertainty token."""
        has_branch = self.probabilistic and self.uncertainty == "branch"
        if self.n_unc_layers is None:
            return 1 if has_branch else 0
        if self.uncertainty != "branch" and any(per_tower(self.n_unc_layers)):
            raise UserError(
                f"An uncertainty token needs no blocks of its own, but n_unc_layers is {self.n_unc_layers}.",
                "Set n_unc_layers to 0, or leave it out, or set uncertainty to branch.",
            )
        if not self.probabilistic and any(per_tower(self.n_unc_layers)):
            raise UserError(
                f"A point model has no uncertainty branch, but n_unc_layers is {self.n_unc_layers}.",
                "Leave n_unc_layers out, or set it to 0.",
            )
        return self.n_unc_layers

    def check(self) -> None:
        """Raise UserError for a head, covariances or a scale that there are not."""
        if self.init_logit_scale is not None and not 0 < self.init_logit_scale < math.inf:
            raise UserError(f"init_logit_scale is {self.init_logit_scale}.", "Give a positive number, such as 14.3.")
        check_head(self.head, self.n_embeddings)
        check_uncertainty(self.uncertainty, self.head, self.probabilistic)
        make_covariance(self.covariance, self.log_var_range, self.log_var_start)
        if not self.probabilistic and (self.covariance != "ellipsoidal" or self.log_var_range is not None):
            raise UserError(
                "A point model has no variances, so it has no choice of covariance or log_var_range.",
                "Leave both out, or make the model probabilistic.",
            )


def create_model(name: str, **options) -> DualEncoder:
    """A PCME++ model on the CPU in float32 and training mode, random or from the weights of a CLIP or of a run.

    Args:
        name: one of open_clip's models, or one of the project's own (`probemb/models/configs`).
        options: those of `ModelOptions`.

    Raises:
        UserError: for an unknown name, head or tag, a size out of range, or weights of another model.
    """
    o = ModelOptions(**options)
    o.check()
    n_unc_layers = plain(o.branch_layers)
    config, source = architecture(name, o.image_size), None
    files = open_clip_files(o.pretrained) if o.pretrained else None
    if o.pretrained and files is None and is_saved_model(o.pretrained):
        with torch.random.fork_rng(devices=[]):  # the random parts of the new model do not depend on where it starts
            source = load_model(o.pretrained).model
    config = _set_text_tower(config, o, source)
    _set_embed_dim(config, name, o, source)
    _set_vocabulary(config, name, o.vocabulary, source)
    if o.match == "cosine":
        config.setdefault("init_logit_bias", LOGIT_BIAS)  # so that open_clip builds it with a bias too
    stock, preprocess = _starting_point(config, name, o, source, files)
    model = DualEncoder(
        {
            "name": name,
            "head": o.head,
            "embed_dim": o.embed_dim or (config["embed_dim"] if o.head in OWN_DIM else GPO_EMBED_DIM),
            "n_unc_layers": n_unc_layers,
            "probabilistic": o.probabilistic,
            "n_embeddings": o.n_embeddings,
            "ranking": o.ranking,
            "attention": o.attention,
            "composer": o.composer,
            "composed_ranking": o.composed_ranking,
            "objective": o.objective,
            "match": o.match,
            "max_logit_scale": o.max_logit_scale,
            "temperature_trained": o.temperature_trained,
            "covariance": o.covariance,
            "log_var_range": plain(o.log_var_range),
            "uncertainty": o.uncertainty,
            "unit_features": o.unit_features,
            "log_var_start": o.log_var_start,
            "uncertainty_bias": o.uncertainty_bias,
            "pooling": {} if o.head in ("pie", "mlp") else dict(POOLING),
            "architecture": plain(config),
            "preprocess": preprocess if o.crop_pct is None else {**preprocess, "crop_pct": o.crop_pct},
        },
        stock,
    )
    if source is not None:
        fill_from_model(model, source, o.pretrained)
    _start_scalars(model, o, source)
    for tower, weights in ((model.visual, o.pretrained or o.image_weights), (model.text, o.pretrained)):
        if o.batch_norm == "batch" or (o.batch_norm == "auto" and not weights):
            tower.use_batch_statistics()
    model.set_grad_checkpointing(o.grad_checkpointing)
    return model


def _set_text_tower(config: dict, o: ModelOptions, source: DualEncoder | None) -> dict:
    """The architecture with ProLIP's text tower, where an uncertainty token is to have it: not beside weights that
    were trained with another.
    """
    if o.uncertainty == "branch":
        return config
    check_uncertainty_token(config)
    if source is not None:
        theirs = source.config["architecture"]["text_cfg"]
        return bidirectional_text(config) if theirs.get("embed_cls") and theirs.get("no_causal_mask") else config
    return config if o.pretrained else bidirectional_text(config)


@torch.no_grad()
def _start_scalars(model: DualEncoder, o: ModelOptions, source: DualEncoder | None) -> None:
    """The scalars' initial values, as far as `o` gives them, or a and b of another form."""
    if o.init_logit_scale is not None:
        model.logit_scale.fill_(math.log(o.init_logit_scale))
    if o.match == "cosine":
        if o.init_logit_bias is not None:
            model.logit_bias.fill_(o.init_logit_bias)
        return
    form = "samples" if o.match == "samples" else "csd"  # a and b of another form are of another unit
    own = source.match_numbers() if source is not None and source.match_form == form else (5.0, 5.0)
    for scalar, start, given in zip((model.scale, model.shift), (o.init_scale, o.init_shift), own):
        scalar.fill_(given if start is None else start)


def _set_embed_dim(config: dict, name: str, o: ModelOptions, source: DualEncoder | None) -> None:
    """Put D into the architecture where its own projection makes it. Raises UserError: weights of another D."""
    if o.embed_dim is not None and o.embed_dim < 1:
        raise UserError(f"embed_dim is {o.embed_dim}.", "Set it to 1 or more.")
    if o.head == "clip" and o.embed_dim not in (None, config["embed_dim"]):
        if o.pretrained and source is None:
            raise UserError(
                f"Pretrained weights of '{name}' embed into {config['embed_dim']} dimensions, not {o.embed_dim}.",
                "Leave embed_dim out, or choose head 'gpo', which has a projection of its own.",
            )
        config["embed_dim"] = o.embed_dim
        if not config["text_cfg"].get("projection", True):  # the states of a GRU in one direction are the embedding
            config["text_cfg"]["hidden"] = o.embed_dim


def _starting_point(
    config: dict, name: str, o: ModelOptions, source: DualEncoder | None, files: OpenClipFiles | None
) -> tuple[nn.Module, dict]:
    """The deterministic model that the new one takes over, and the preprocessing that belongs to its weights."""
    if o.image_weights and (tower_kind(config, "vision_cfg") != "timm" or source is not None):
        raise UserError(
            "image_weights are for a new model with an image tower from timm.",
            "Set image_weights to null, or name an architecture such as resnet-gru without pretrained.",
        )
    if source is not None:
        return build_stock(config), source.config["preprocess"]
    preprocess = plain(vars(PreprocessCfg(size=config["vision_cfg"].get("image_size", 224))))
    if o.pretrained and not is_open_clip(config):
        raise UserError(
            f"'{o.pretrained}' is no run and no folder with a model, which '{name}' starts from.",
            "Give a run or a folder that save_model wrote, or leave pretrained out.",
        )
    weights, wanted = None, {}
    if files is not None:
        weights, wanted = files.weights, starting_point(read_config(files.config), files.config, name, config)
    elif o.pretrained:
        weights, wanted = find_pretrained(name, o.pretrained, config.get("quick_gelu", False))
    stock = build_stock(config)
    if weights:
        fill_stock(stock, weights)
    if o.image_weights:
        from probemb.models.towers.timm_image import pretrained_trunk

        stock.visual, wanted = pretrained_trunk(config["vision_cfg"], o.image_weights)
    return stock, {**preprocess, **plain(wanted)}


def vocabulary_for(
    name: str, given: str | None, pretrained: str | None, data: Iterable[str | Path], texts: Iterable[str] | None = None
) -> str | list[str] | None:
    """The vocabulary that `create_model` needs: the file given, else the words of `texts`, else the file beside the
    data; None for an architecture that reads no words, or that comes with them.

    Raises:
        UserError: the architecture reads words, and there is no vocabulary.
    """
    if given or not reads_words(read_architecture(name)) or (pretrained and is_saved_model(pretrained)):
        return given
    if texts is not None:
        return [word for word, _ in frequent_words(count_words(texts))]
    return str(find_vocabulary(data))


def fill_word_vectors(model: DualEncoder, path: str | Path) -> str:
    """Start the word embeddings from vectors in GloVe's text format, plain or .gz.

    Returns:
        how many words had a vector, as a sentence.

    Raises:
        UserError: the model reads no words, the file is malformed, or its vectors are of another width or of no word of
            the vocabulary.
    """
    config = model.config
    if not reads_words(config["architecture"]):
        raise UserError(
            f"{config['name']} reads no whole words, so word vectors have no use.", "Leave word_vectors out."
        )
    words = config["architecture"]["text_cfg"]["vocabulary"]
    found = model.text.fill_embedding(read_vectors(path, words))
    if not found:
        raise UserError(
            f"{path} has a vector of none of the {len(words):,} words of the vocabulary.",
            "Name vectors of the captions' language, with lower-case words, or leave word_vectors out.",
        )
    few = ", fewer than half: the others are random" if found < len(words) / 2 else ""
    return f"{found:,} of {len(words):,} words start from a vector in {path}{few}"


def _set_vocabulary(
    config: dict, name: str, vocabulary: str | Path | Sequence[str] | None, source: DualEncoder | None
) -> None:
    """Put the words into the architecture, so that a saved model carries them."""
    text = config["text_cfg"]
    if not reads_words(config):
        if vocabulary is not None:
            raise UserError(f"{name} reads no whole words, so a vocabulary has no use.", "Leave vocabulary out.")
    elif vocabulary is not None:
        text["vocabulary"] = read_vocabulary(vocabulary) if isinstance(vocabulary, str | Path) else list(vocabulary)
    elif source is not None and "vocabulary" in source.config["architecture"]["text_cfg"]:
        text["vocabulary"] = source.config["architecture"]["text_cfg"]["vocabulary"]
