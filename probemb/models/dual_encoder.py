"""PCME++: two towers that embed images and texts as diagonal normal distributions in one space (PCME++ §3.3).

`create.py` makes one from a name, `hub.py` from a file.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import NamedTuple

import torch
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.gaussian import Gaussian
from probemb.models.architectures import check_supported
from probemb.models.heads.gpo import GPOHead
from probemb.models.towers.open_clip_transformer import HEADS, ImageTower, TextTower

POOLING = {"code_dim": 32, "hidden_dim": 32}


class ModelOutput(NamedTuple):
    """What a training step needs; the three scalars have shape (1,).

    Attributes:
        image: Gaussian (B, D).
        text: Gaussian (B, D).
        logit_scale: CLIP's inverse temperature, already exponentiated.
        scale: a of the match probability sigmoid(−a·d + b).
        shift: b of the same.
    """

    image: Gaussian
    text: Gaussian
    logit_scale: Tensor
    scale: Tensor
    shift: Tensor


class ProbabilisticCLIP(nn.Module):
    """Both towers and the three learnable scalars; `create_model` makes one from a name.

    Args:
        config: as `model.config` returns it. Its keys: "name" (for people), "architecture" (open_clip's
            configuration), "preprocess" (open_clip's PreprocessCfg), "head", "embed_dim", "n_unc_layers",
            "probabilistic" (True where it is absent), "uncertainty_bias", "pooling" (GPO's sizes).
        stock: an open_clip model of that architecture whose parameters the new model takes over; None for a random one.

    Attributes:
        visual, text: the towers; everything that open_clip has too has open_clip's names.
        logit_scale, scale, shift: parameters of shape (1,), log(1/0.07), 1 and 1 at first. Which of them a training
            step uses depends on its loss; turn `requires_grad` off for the others before DDP sees the model, or DDP
            waits for their gradients.
    """

    def __init__(self, config: dict, stock: CustomTextCLIP | None = None):
        super().__init__()
        self._config = {"probabilistic": True, **deepcopy(config)}
        check_head(config["head"])
        stock = stock or build_stock(config["architecture"])
        image_unc, text_unc = _uncertainty_branches(config) if self.probabilistic else (None, None)
        head = (config["head"], config["embed_dim"], config["uncertainty_bias"], config["pooling"])
        self.visual = ImageTower(stock.visual, image_unc, *head)
        self.text = TextTower(stock.text, text_unc, *head)
        self.logit_scale = stock.logit_scale
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.ones(1))
        self._initialize_heads()

    def forward(self, images: Tensor, tokens: Tensor) -> ModelOutput:
        """(B, 3, H, W) float and (B, L) int64 -> ModelOutput."""
        # Copies of scale and shift: ZeRO-3 with recomputed blocks loses track of a parameter that is an output.
        return ModelOutput(
            self.encode_image(images),
            self.encode_text(tokens),
            self.logit_scale.exp(),
            self.scale.clone(),
            self.shift.clone(),
        )

    def encode_image(self, pixels: Tensor, token_mask: Tensor | None = None) -> Gaussian:
        """(B, 3, H, W), normalised as `create_transforms` does -> Gaussian (B, D), mean l2-normalised.

        The result is at least float32, also under autocast and with half-precision weights.
        `token_mask` (B, T) bool: tokens that take part in GPO's pooling (SizeAugment; head "gpo" only).
        """
        return Gaussian(*self.visual(pixels, token_mask))

    def encode_text(self, tokens: Tensor, token_mask: Tensor | None = None) -> Gaussian:
        """(B, L) int64 -> Gaussian (B, D), as `encode_image`.

        L may be shorter than the context length, see `cut_padding`.
        """
        return Gaussian(*self.text(tokens, token_mask))

    def cut_padding(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens without the columns behind the longest text: the same embeddings in less time.

        Leaves models alone whose texts see their padding (blocks that are not causal, as CLIPA's).
        """
        text = self.text
        if text.attn_mask is None or text.pool_type not in ("argmax", "eos"):
            return tokens
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        longest = int((position * (tokens != text.pad_id)).max())  # the end token is no padding
        return tokens[:, : max(1, longest)]

    @property
    def config(self) -> dict:
        """What `ProbabilisticCLIP(config)` needs to build this model again; plain JSON types, a fresh copy."""
        return deepcopy(self._config)

    @property
    def probabilistic(self) -> bool:
        """Whether the log-variances are predicted; a point model's are all POINT_LOG_VAR."""
        return self._config["probabilistic"]

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

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes every block in the backward pass instead of keeping its activations."""
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    @torch.no_grad()
    def _initialize_heads(self) -> None:
        # A bias of −log D makes each item's summed variance about 1, so that distances start near ‖μ_v − μ_t‖² ≤ 4
        # for every D. At log_var = 0 they would start at 2D, and the match loss far in its linear range.
        for tower in (self.visual, self.text):
            if tower.log_var_head is not None:
                head = tower.log_var_head
                linear = head.linear if isinstance(head, GPOHead) else head
                # Small weights: log_var stays near its bias although the branch's tokens are not normalised.
                nn.init.normal_(linear.weight, std=0.1 * linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.constant_(linear.bias, -math.log(self.embed_dim))
            if hasattr(tower, "mean_head"):
                nn.init.xavier_uniform_(tower.mean_head.linear.weight)
                nn.init.zeros_(tower.mean_head.linear.bias)


def build_stock(config: dict) -> CustomTextCLIP:
    """open_clip's own model of an architecture, with `logit_scale` of shape (1,)."""
    options = {key: value for key, value in config.items() if key != "custom_text"}
    return CustomTextCLIP(**options, nonscalar_logit_scale=True)


def no_weight_decay(name: str, param: Tensor) -> bool:
    """Whether an optimizer should leave a parameter out of weight decay: norms, biases, vectors and scalars.

    open_clip's rule; embeddings and projections are matrices and decay.
    """
    return param.ndim < 2 or name.rpartition(".")[2] in ("logit_scale", "scale", "shift")


def _uncertainty_branches(config: dict) -> tuple[nn.Module, nn.Module]:
    """Random blocks for both towers' uncertainty branches, drawn as open_clip draws those of a whole tower."""
    shape = config["architecture"]
    check_supported(shape, config["name"])
    n, vision, text = config["n_unc_layers"], shape["vision_cfg"], shape["text_cfg"]
    check_n_unc_layers(shape, n)
    patch = vision.get("patch_size", 16)
    small = {  # open_clip builds the blocks; around them everything is as small as it can be, and is dropped
        **{key: value for key, value in shape.items() if key not in ("custom_text", "embed_dim")},
        "vision_cfg": {**vision, "layers": max(n, 1), "image_size": patch},
        "text_cfg": {**text, "layers": max(n, 1), "vocab_size": 1, "context_length": 1},
    }
    branches = CustomTextCLIP(embed_dim=1, **small)
    image, text_branch = branches.visual.transformer, branches.text.transformer
    for transformer in (image, text_branch):
        transformer.resblocks = transformer.resblocks[:n]
    with torch.no_grad():
        # open_clip scales the text blocks' output matrices by 1/√(number of blocks): here that of the whole tower.
        for block in text_branch.resblocks:
            for linear in (block.attn.out_proj, block.mlp.c_proj):
                linear.weight.mul_(math.sqrt(n / text.get("layers", 12)))
    return image, text_branch


def check_head(head: str) -> None:
    """Raises UserError for an unknown one."""
    if head not in HEADS:
        raise UserError(f"There is no head '{head}'.{nearest(head, HEADS)}", "Choose 'clip' or 'gpo'.")


def check_n_unc_layers(architecture: dict, n: int) -> None:
    """Raises UserError for a branch longer than a tower."""
    image, text = (architecture[tower].get("layers", 12) for tower in ("vision_cfg", "text_cfg"))
    if not 0 <= n <= min(image, text):
        raise UserError(
            f"n_unc_layers is {n}, but the towers have {image} (image) and {text} (text) blocks.",
            f"Set it to a number from 0 to {min(image, text)}.",
        )


def plain(value):
    """Tuples become lists, as in JSON, so that a configuration equals its own copy on disk."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
