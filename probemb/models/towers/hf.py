"""open_clip's text towers from Hugging Face (RoBERTa, XLM-RoBERTa, mT5, NLLB), with their last layers again as branch.

They need the package transformers, and the model's configuration from the hub or its cache. The parameters keep
open_clip's names (`transformer.…`, `proj.…`). Shapes: B texts, L positions, W width.
"""

from __future__ import annotations

import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from probemb.models.architectures import stock_text_tower
from probemb.models.encoder import BothFeatures, Encoder
from probemb.models.heads import Features
from probemb.models.options import ModelOptions
from probemb.models.towers.branch import Branch, check_n_unc_layers


class HFText(Encoder):
    """A Hugging Face text encoder behind open_clip's adapter, whose pooler and projection head "clip" alone keeps.

    Without `own_layers` for the uncertainty branch, the log-variance reads the last layer's tokens of the mean.
    """

    def __init__(self, stock: HFTextEncoder, own_layers: list[nn.Module], o: ModelOptions, context_length: int):
        super().__init__()
        self.context_length = context_length
        self.pad_id = stock.config.pad_token_id
        self.transformer = stock.transformer
        self.pooler, self.proj = (stock.pooler, stock.proj) if o.head == "clip" else (None, nn.Identity())
        self._class_token = "cls" in type(stock.pooler).__name__.lower()
        layers = text_layers(self.transformer)
        self.uncertainty_layers = Branch(own_layers, layers) if own_layers else None
        where = next(name for name, module in self.named_modules() if module is layers)
        self.blocks = [f"{where}.{i}" for i in range(len(layers))]
        self.branch_blocks = [f"uncertainty_layers.{i}" for i in range(len(own_layers))]
        width = getattr(stock.config, arch_dict[stock.config.model_type]["config_names"]["width"])
        self.add_heads(o, width, width, own_projection=o.head == "clip")
        if self.pooler is None and getattr(self.transformer, "pooler", None) is not None:
            self.transformer.pooler = None  # BERT's, which no other head reads

    def features(self, tokens: Tensor) -> BothFeatures:
        branch = self.uncertainty_layers
        if branch is not None:
            branch.listen()
        mask = tokens != self.pad_id
        out = self.transformer(input_ids=tokens, attention_mask=mask.long())
        last = out.last_hidden_state
        pooled = self._pool(last, mask) if self.pooler is None else self.proj(self.pooler(out, mask.long()))
        mean = Features(last, pooled, mask)
        if not self.options.probabilistic:
            return mean, None
        unc = last if branch is None else branch(*branch.heard())
        return mean, Features(unc, self._pool(unc, mask), mask)

    def trim(self, tokens: Tensor) -> Tensor:
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return tokens[:, : max(1, int((position * (tokens != self.pad_id)).max()))]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if self.uncertainty_layers is not None:
            self.uncertainty_layers.grad_checkpointing = enable
        if enable:
            self.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.transformer.gradient_checkpointing_disable()

    def in_stem(self, name: str) -> bool:
        return name.startswith("transformer.") and "embed" in name and self.place(name) == ("trunk", 0)

    def _pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The first token, or the average of all that are no padding: whichever open_clip pools by."""
        if self._class_token:
            return tokens[:, 0]
        weight = mask[..., None].to(tokens.dtype)
        return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)


def text_tower(architecture: dict, o: ModelOptions, n_unc_layers: int, stock: HFTextEncoder | None) -> HFText:
    """An HFText of open_clip's configuration. Raises UserError: that cannot be read from the hub."""
    stock = stock or stock_text_tower(architecture)
    check_n_unc_layers(n_unc_layers, len(text_layers(stock.transformer)), "text")
    own = []
    if n_unc_layers and o.probabilistic:
        own = list(text_layers(stock_text_tower(architecture).transformer))[-n_unc_layers:]
    return HFText(stock, own, o, architecture["text_cfg"].get("context_length", 77))


def text_layers(transformer: nn.Module) -> nn.ModuleList:
    """The layers of a Hugging Face encoder."""
    encoder = getattr(transformer, "encoder", transformer)
    return next(getattr(encoder, name) for name in ("layer", "layers", "block") if hasattr(encoder, name))
