"""DualEncoder: two towers that embed images and texts as diagonal normal distributions in one space (PCME++ §3.3).

`create.py` makes one from a name, `hub.py` from a file.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Literal, NamedTuple

import torch
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn

from probemb.cross_attention import CrossAttention
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.models.architectures import build_stock, check_sizes, check_uncertainty_token
from probemb.models.composers import create_composer
from probemb.models.encoder import Encoder
from probemb.models.heads import HeadConfig, check_head, check_uncertainty, make_covariance
from probemb.models.match import MatchModel
from probemb.models.towers import make_image_tower, make_text_tower

POOLING = {"code_dim": 32, "hidden_dim": 32}
DEFAULTS = {  # of keys that configurations once did not have
    "probabilistic": True,
    "n_embeddings": 1,
    "ranking": "csd",
    "covariance": "ellipsoidal",
    "log_var_range": None,
    "log_var_start": None,
    "attention": None,
    "composer": None,
    "composed_ranking": "cosine",
    "uncertainty": "branch",
    "unit_features": False,
    "objective": None,
    "match": "distance",
    "max_logit_scale": 100.0,  # CLIP's
    "temperature_trained": True,
}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


VALID = {  # values of a configuration that nothing else looks at before they are used
    "embed_dim": lambda value: _is_count(value) and value > 0,
    "n_unc_layers": lambda value: all(map(_is_count, per_tower(value))),
    "n_embeddings": _is_count,
    "probabilistic": lambda value: isinstance(value, bool),
    "uncertainty_bias": lambda value: isinstance(value, bool),
    "temperature_trained": lambda value: isinstance(value, bool),
    "unit_features": lambda value: isinstance(value, bool),
    "ranking": lambda value: isinstance(value, str),
    "composed_ranking": lambda value: value in ("cosine", "density"),
    "match": lambda value: value in ("distance", "cosine", "samples", "none"),
    "max_logit_scale": lambda value: value is None or (type(value) in (int, float) and 0 < value < math.inf),
}


class ModelOutput(NamedTuple):
    """A forward pass of both towers, and the three scalars, of shape (1,).

    Attributes:
        image: Gaussian (B, D).
        text: Gaussian (B, D).
        logit_scale: the inverse temperature, exponentiated and at most `max_logit_scale`.
        scale: a of the match probability sigmoid(−a·d + b).
        shift: b of the same.
    """

    image: Gaussian
    text: Gaussian
    logit_scale: Tensor
    scale: Tensor
    shift: Tensor


def check_config(config: dict, state: dict[str, Tensor]) -> None:
    """Raise ValueError for an untrusted configuration with values of a wrong type or range, or that does not match the
    sizes of these weights; `DualEncoder` refuses the rest.
    """
    for key, is_valid in VALID.items():
        if key in config and not is_valid(config[key]):
            raise ValueError(f"{key} is {config[key]!r}")
    check_sizes(config["architecture"], state)


class DualEncoder(nn.Module):
    """Both towers and the learnable scalars; `create_model` makes one from a name.

    Args:
        config: as `model.config` returns it. Its keys: "name" (for people), "architecture" (open_clip's form, see
            `architectures.py`), "preprocess" (open_clip's PreprocessCfg), "head", "embed_dim", "n_unc_layers" (a
            number, or one each for image and text), "uncertainty_bias", "pooling" (options of the head), and, where
            they are absent, the values of DEFAULTS: "probabilistic", "n_embeddings", "ranking", "covariance",
            "log_var_range" and "log_var_start" (see `heads.covariance`), "composer" (a name of `composers`),
            "objective" (the name of the loss that trains the model, for people), "match" (see `match_scalars`),
            "max_logit_scale" (the ceiling of exp(logit_scale), None for none), "temperature_trained" (whether the loss
            trained logit_scale), "uncertainty" and "unit_features" (see
            `heads.HeadConfig`).
        stock: the deterministic model (`build_stock`) whose parameters the new model takes over; None for random ones.

    Attributes:
        visual, text: the towers, each an `Encoder`; everything that open_clip has too has open_clip's names.
        logit_scale, and scale and shift or logit_bias: parameters of shape (1,), see `match_scalars`; log(1/0.07), 1
            and 1 at first. Which of them a training step uses depends on its loss; turn `requires_grad` off for the
            others before DDP sees the model, or DDP waits for their gradients.
        composer: makes one embedding of several, of models that were trained to (MPC and its rivals); else None.
        logit_bias: of architectures that were made for a sigmoid loss, such as SigLIP's; where "match" is not "cosine"
            it is a buffer, which only an export reads.
    """

    def __init__(self, config: dict, stock: nn.Module | None = None):
        super().__init__()
        self._config = {**DEFAULTS, **deepcopy(config)}
        check_head(config["head"], self._config["n_embeddings"])
        check_uncertainty(self._config["uncertainty"], config["head"], self.probabilistic)
        shape = config["architecture"]
        if self._config["uncertainty"] != "branch":
            check_uncertainty_token(shape)
        stock = stock or build_stock(shape)
        head = HeadConfig(
            config["head"],
            config["embed_dim"],
            self.probabilistic,
            config["uncertainty_bias"],
            self._config["n_embeddings"],
            config["pooling"],
            make_covariance(*(self._config[key] for key in ("covariance", "log_var_range", "log_var_start"))),
            self._config["uncertainty"],
            self._config["unit_features"],
        )
        image_layers, text_layers = per_tower(config["n_unc_layers"])
        self.visual = make_image_tower(shape, image_layers, head, stock.visual)
        self.visual.normalization = channel_statistics(config["preprocess"])
        self.text = make_text_tower(shape, text_layers, head, stock.text)
        self.logit_scale = stock.logit_scale
        composer = self._config["composer"]
        self.composer = None if composer is None else create_composer(composer, config["embed_dim"])
        if self._config["match"] == "cosine":
            self.logit_bias = stock.logit_bias
        else:
            if stock.logit_bias is not None:
                self.register_buffer("logit_bias", stock.logit_bias.detach())
            self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor, tokens: Tensor, kept: Tensor | None = None) -> ModelOutput:
        """(B, 3, H, W) uint8, or float that is normalised, and (B, L) int64 -> ModelOutput; `kept`: of the patches."""
        image, text = self.encode_image(images, kept=kept), self.encode_text(tokens)
        return ModelOutput(image, text, self.inverse_temperature(), *self.match_scalars())

    def scalars(self) -> dict[str, nn.Parameter]:
        """The model's own parameters of shape (1,), by name."""
        return dict(self.named_parameters(recurse=False))

    def inverse_temperature(self) -> Tensor:
        """exp(logit_scale), (1,), at most `max_logit_scale`."""
        scale, limit = self.logit_scale.exp(), self._config["max_logit_scale"]
        return scale if limit is None else ceiling(scale, limit)

    @property
    def trained_temperature(self) -> float | None:
        """`inverse_temperature` as a number; None if the loss did not train it."""
        return float(self.inverse_temperature().detach()) if self._config["temperature_trained"] else None

    def match_scalars(self) -> tuple[Tensor, Tensor]:
        """a and b of the match probability sigmoid(-a CSD + b), (1,) each, with gradient.

        Where "match" is "distance" they are the parameters scale and shift (PCME++ Eq. 2). Where it is "cosine", the
        model was trained on sigmoid(s (cosine - u / 2) + logit_bias), u = u_image + u_text and s the inverse
        temperature (SigLIP; ProLIP §3.2). Of unit means that is the same function: a = s / 2, b = s + logit_bias.
        Where it is "samples", scale and shift are a and b of PCME's sampled form. Where it is "none", the loss had no
        such scalars, or they are of another distance: scale and shift are constants without a meaning.
        """
        if self._config["match"] == "cosine":
            s = self.inverse_temperature()
            return s / 2, s + self.logit_bias
        # Copies: ZeRO-3 with recomputed blocks loses track of a parameter that is an output.
        return self.scale.clone(), self.shift.clone()

    def match_numbers(self) -> tuple[float, float]:
        """a and b as numbers."""
        a, b = self.match_scalars()
        return a.item(), b.item()

    def encode_image(self, pixels: Tensor, token_mask: Tensor | None = None, kept: Tensor | None = None) -> Gaussian:
        """(B, 3, H, W) uint8, or float that is normalised -> Gaussian (B, D), mean l2-normalised.

        The result is at least float32, also under autocast and with half-precision weights.

        Args:
            token_mask: (B, T) bool, tokens that take part in pooling (SizeAugment; heads that read tokens).
            kept: (B, n) int64, the patches that the tower reads, such as `draw_parts` gives; None for all.

        Raises:
            UserError: an image in place of its pixels, or pixels of one image without a batch; `kept` for an image
                tower without patches.
        """
        if not isinstance(pixels, Tensor) or (pixels.dtype == torch.uint8 and pixels.ndim == 3):
            given = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise UserError(
                f"encode_image takes pixels (B, 3, H, W), not {given}.",
                "Call model.encode_image(transforms.evaluate(image)[None]), with model, tokenizer, transforms = "
                "load_model(...).",
            )
        return self.visual.encode(pixels, token_mask, kept=kept).gaussian

    def encode_text(self, tokens: Tensor, token_mask: Tensor | None = None, kept: Tensor | None = None) -> Gaussian:
        """(B, L) int64 -> Gaussian (B, D), as `encode_image`; `kept` is of tokens.

        L may be shorter than the context length, see `cut_padding`. Raises UserError: words in place of tokens.
        """
        if not isinstance(tokens, Tensor):
            raise UserError(
                f"encode_text takes tokens (B, L), not {type(tokens).__name__}.",
                'Call model.encode_text(tokenizer(["a dog"])), with model, tokenizer, transforms = load_model(...).',
            )
        return self.text.encode(tokens, token_mask, kept=kept).gaussian

    def cut_padding(self, tokens: Tensor, device: torch.device | None = None) -> Tensor:
        """(B, L) tokens without the columns behind the longest text: the same embeddings in less time.

        On `device`, if one is given. All columns travel: some of them are no single block of memory, and the GPU's work
        would have to end before such a copy began.
        """
        cut = self.text.trim(tokens)
        if device is None:
            return cut
        return tokens.to(device, non_blocking=True)[:, : cut.shape[1]].contiguous()

    @property
    def image_tower(self) -> Encoder:
        """The tower that `encode_image` runs."""
        return self.visual

    @property
    def text_tower(self) -> Encoder:
        """The tower that `encode_text` runs."""
        return self.text

    def place(self, name: str) -> tuple[str, str, int]:
        """("image" or "text", part, depth) of a named parameter, see `Place`.

        Outside of the towers ("neither", "composer", 0) or ("neither", "scalar", 0).
        """
        tower, _, rest = name.partition(".")
        if tower == "composer":
            return "neither", "composer", 0
        if tower not in ("visual", "text"):
            return "neither", "scalar", 0
        return "image" if tower == "visual" else "text", *getattr(self, tower).place(rest)

    def in_stem(self, name: str) -> bool:
        """True if a named parameter lies before a tower's blocks, see `Encoder.in_stem`."""
        tower, _, rest = name.partition(".")
        return tower in ("visual", "text") and getattr(self, tower).in_stem(rest)

    def pretrained_tower(self, name: str) -> str | None:
        """ "image" or "text" for a named parameter that pretrained weights would fill, else None."""
        tower, _, rest = name.partition(".")
        if tower not in ("visual", "text") or not getattr(self, tower).is_pretrained(rest):
            return None
        return "image" if tower == "visual" else "text"

    @property
    def batch_statistics(self) -> bool:
        """True if batch norms normalise by the batch in training, see `Encoder.use_batch_statistics`."""
        return self.visual.batch_statistics or self.text.batch_statistics

    @property
    def config(self) -> dict:
        """The configuration that `DualEncoder(config)` rebuilds this model from; plain JSON types, a fresh copy."""
        return deepcopy(self._config)

    @property
    def probabilistic(self) -> bool:
        """True if the log-variances are predicted; a point model's are all POINT_LOG_VAR."""
        return self._config["probabilistic"]

    @property
    def objective(self) -> str | None:
        """The name of the loss that trained the model, as far as it is known."""
        return self._config["objective"]

    @property
    def match_form(self) -> Literal["csd", "samples", "none"]:
        """The form of the match probability, see `MatchModel`; a point model has none by a and b of normals."""
        match = self._config["match"]
        if match == "cosine":
            return "csd"
        return {"distance": "csd", "samples": "samples"}.get(match, "none") if self.probabilistic else "none"

    @property
    def predicts_matches(self) -> bool:
        """True if there is a match probability."""
        return self.match_form != "none"

    def match_probability(
        self, image: Gaussian, text: Gaussian, among: Literal["images", "texts"] | None = None
    ) -> Tensor:
        """The probability that each image and text match, (N, M), see `MatchModel.probability`."""
        return MatchModel.of(self).probability(image, text, among)

    @property
    def ranking(self) -> str:
        """Ranking that the model was trained for, a name of `probemb.evaluation.rankings`; CSD of points is "mean"."""
        ranking = self._config["ranking"]
        return "mean" if ranking == "csd" and not self.probabilistic else ranking

    @property
    def composed_ranking(self) -> Literal["cosine", "density"]:
        """Ranking of `evaluation.composed` that the composer was trained for."""
        return self._config["composed_ranking"]

    @property
    def attention(self) -> CrossAttention | None:
        """Scoring of pairs by the ranking "attention", for models that were trained for it."""
        options = self._config["attention"]
        return None if options is None else CrossAttention(**options)

    @property
    def n_embeddings(self) -> int:
        """K, the embeddings of every item."""
        return self._config["n_embeddings"]

    @property
    def embed_dim(self) -> int:
        """D."""
        return self._config["embed_dim"]

    @property
    def context_length(self) -> int:
        """Tokens of a text."""
        return self.text.context_length

    @property
    def image_size(self) -> int:
        """Height and width of an image, in pixels."""
        return self.visual.image_size[0]

    def normalized(self, images: Tensor) -> Tensor:
        """uint8 images as the floats that `encode_image` also takes, to change them: 0 is the mean colour."""
        return self.visual.normalized(images, torch.float32) if images.dtype == torch.uint8 else images

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)


def channel_statistics(preprocess: dict) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in open_clip's PreprocessCfg. Raises ValueError: they are none."""
    wanted = PreprocessCfg(**{key: value for key, value in preprocess.items() if key != "crop_pct"})
    both = (value if isinstance(value, list | tuple) else (value,) * 3 for value in (wanted.mean, wanted.std))
    mean, std = (tuple(map(float, value)) for value in both)
    if not (len(mean) == len(std) == 3 and all(map(math.isfinite, mean + std)) and min(std) > 0):
        raise ValueError(f"a mean of {mean} and a deviation of {std} in place of three numbers each")
    if not 0.1 <= preprocess.get("crop_pct", 1) <= 1:  # less would enlarge images without bounds
        raise ValueError(f"a crop_pct of {preprocess['crop_pct']}")
    return mean, std


class _Ceiling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x >= limit)
        return x.clamp(max=limit)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (at_limit,) = ctx.saved_tensors
        return torch.where(at_limit & (grad < 0), torch.zeros_like(grad), grad), None


def ceiling(x: Tensor, limit: float) -> Tensor:
    """min(x, limit), whose gradient at the limit may lower x but not raise it."""
    return _Ceiling.apply(x, limit)


def per_tower(n_unc_layers: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """The numbers of branch layers of the image and of the text tower."""
    return (n_unc_layers, n_unc_layers) if isinstance(n_unc_layers, int) else tuple(n_unc_layers)


def no_weight_decay(name: str, param: Tensor) -> bool:
    """True if an optimizer should leave a parameter out of weight decay: norms, biases, vectors and scalars.

    open_clip's rule; embeddings and projections are matrices and decay.
    """
    return param.ndim < 2 or name.rpartition(".")[2] in ("logit_scale", "logit_bias", "scale", "shift")


def plain(value):
    """Tuples become lists, as in JSON, so that a configuration equals its own copy on disk."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
