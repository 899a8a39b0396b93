"""open_clip's text towers from Hugging Face (RoBERTa, XLM-RoBERTa, mT5, NLLB), with their last layers again as branch.

They need the package transformers, and the model's configuration from the hub or its cache. The parameters keep
open_clip's names (`transformer.…`, `proj.…`). Shapes: B texts, L positions, W width.
"""

from __future__ import annotations

import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from probemb.gaussian import at_least_float32
from probemb.models.architectures import check_n_unc_layers, stock_text_tower
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.towers.branch import Branch


class HFText(Encoder):
    """A Hugging Face text encoder behind open_clip's adapter.

    Args:
        stock: open_clip's tower; its transformer, pooler and projection are taken over.
        own_layers: the uncertainty branch's; with none, the log-variance reads the last layer's tokens of the mean.
        head: of the mean and the log-variance. Only "clip" keeps open_clip's pooler and projection.
        context_length: tokens of a text.
    """

    def __init__(self, stock: HFTextEncoder, own_layers: list[nn.Module], head: HeadConfig, context_length: int):
        super().__init__()
        self.context_length = context_length
        self.pad_id = stock.config.pad_token_id
        self.transformer = stock.transformer
        self.pooler, self.proj = (stock.pooler, stock.proj) if head.kind == "clip" else (None, nn.Identity())
        self._class_token = "cls" in type(stock.pooler).__name__.lower()
        self.uncertainty_layers = Branch(own_layers, text_layers(stock)) if own_layers else None
        self._probabilistic = head.probabilistic
        width = getattr(stock.config, arch_dict[stock.config.model_type]["config_names"]["width"])
        own_projection = head.kind == "clip"
        add_heads(self, head, width, width, own_projection)
        if self.pooler is None and getattr(self.transformer, "pooler", None) is not None:
            self.transformer.pooler = None  # BERT's, which no other head reads

    def features(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """(B, L) int64 -> features with L tokens."""
        branch = self.uncertainty_layers
        if branch is not None:
            branch.listen()
        mask = tokens != self.pad_id
        out = self.transformer(input_ids=tokens, attention_mask=mask.long())
        last = out.last_hidden_state
        pooled = self._pool(last, mask) if self.pooler is None else self.proj(self.pooler(out, mask.long()))
        mean = Features(last, pooled, mask)
        if not self._probabilistic:
            return mean, None
        unc = last if branch is None else branch(*branch.heard())
        return mean, Features(unc, self._pool(unc, mask), mask)

    def project(self, pooled: Tensor) -> Tensor:
        """The pooled features, which open_clip's projection has brought to D already."""
        return at_least_float32(pooled)

    def trim(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens without the columns in which every text is padding."""
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return tokens[:, : max(1, int((position * (tokens != self.pad_id)).max()))]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute layers in the backward pass."""
        if self.uncertainty_layers is not None:
            self.uncertainty_layers.grad_checkpointing = enable
        if enable:
            self.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.transformer.gradient_checkpointing_disable()

    def place(self, name: str) -> Place:
        """Layers by their depth; embeddings, pooler and projection are in none."""
        part, _, rest = name.partition(".")
        if part in ("mean_head", "log_var_head"):
            return Place("head")
        if part == "uncertainty_layers":
            return Place("branch", len(self.uncertainty_layers) - int(rest.partition(".")[0]))
        layers = _layers(self.transformer)
        prefix = next(key for key, module in self.named_modules() if module is layers) + "."
        if name.startswith(prefix):
            return Place("trunk", len(layers) - int(name.removeprefix(prefix).partition(".")[0]))
        return Place("trunk")

    def in_stem(self, name: str) -> bool:
        """The embeddings."""
        return name.startswith("transformer.") and "embed" in name and self.place(name) == ("trunk", 0)

    def _pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The first token, or the average of all that are no padding: whichever open_clip pools by."""
        if self._class_token:
            return tokens[:, 0]
        weight = mask[..., None].to(tokens.dtype)
        return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)


def make_text_tower(
    architecture: dict, n_unc_layers: int, head: HeadConfig, stock: HFTextEncoder | None = None
) -> HFText:
    """An HFText of open_clip's configuration; `stock` is taken over, None for random weights.

    Raises:
        UserError: if the configuration cannot be read from the hub, or the tower has fewer layers than the branch.
    """
    stock = stock or stock_text_tower(architecture)
    layers = text_layers(stock)
    check_n_unc_layers(n_unc_layers, len(layers), "text")
    own = text_layers(stock_text_tower(architecture))[-n_unc_layers:] if n_unc_layers and head.probabilistic else []
    return HFText(stock, own, head, architecture["text_cfg"].get("context_length", 77))


def text_layers(stock: HFTextEncoder) -> list[nn.Module]:
    """The layers of its transformer."""
    return list(_layers(stock.transformer))


def _layers(transformer: nn.Module) -> nn.ModuleList:
    encoder = getattr(transformer, "encoder", transformer)
    return next(getattr(encoder, name) for name in ("layer", "layers", "block") if hasattr(encoder, name))
