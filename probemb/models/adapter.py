"""The adapter of a model: what gives the embeddings of trained towers an uncertainty, saved and loaded with them.

model.encode_image(pixels)          # the towers' embedding, then the adapter: Gaussian (B, D)

An adapter's options are `config["adapter"]`: {"method": a name of ADAPTERS, and the keywords of its modules}, and maybe
"temperature": T and k of queries by images and of those by texts, so that the softmax of their cosines over T u^k is
calibrated. Where a method has an aleatoric and an epistemic part they are kept apart: the embeddings have the first,
and `model.adapter.text.epistemic(means)` gives the second (ProbVLM); laplace's variance is epistemic alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from probemb.adapters import GaussianAdapter, LaplaceProjection, OrderAdapter, ProbVLMAdapter, SphericalAdapter
from probemb.errors import UserError
from probemb.gaussian import Gaussian, at_least_float32
from probemb.models.dual_encoder import DualEncoder
from probemb.models.encoder import Encoded, Encoder
from probemb.models.heads import Features, MaxMeanHead, full_precision


class Kind(NamedTuple):
    """Modules of images and of texts, None for points, and the ranking of the adapted model."""

    image: type[nn.Module] | None
    text: type[nn.Module]
    ranking: str = "mean"


ADAPTERS = {
    "laplace": Kind(LaplaceProjection, LaplaceProjection, "csd"),
    "gaussian": Kind(GaussianAdapter, GaussianAdapter, "csd"),
    "loss-order": Kind(OrderAdapter, OrderAdapter),
    "asymvlm": Kind(None, SphericalAdapter),
    "probvlm": Kind(ProbVLMAdapter, ProbVLMAdapter),
}


class Adapter(nn.Module):
    """Both modules of an adapter; options as in the module's docstring, each value one for both or a list of two."""

    def __init__(self, options: dict, dim: int):
        super().__init__()
        kind = ADAPTERS[options["method"]]
        both = {key: value if isinstance(value, list) else [value] * 2 for key, value in options.items()}
        self.temperature = [[float(x) for x in two] for two in both.pop("temperature", ())] or [None, None]
        image, text = ({key: two[i] for key, two in both.items() if key != "method"} for i in (0, 1))
        self.image = kind.image and kind.image(dim, **image)
        self.text = kind.text(dim, **text)
        self.moves = any(getattr(module, "moves", False) for module in (self.image, self.text))  # the means

    def adapt(self, module: nn.Module | None, tower: Encoder, encode: Callable[..., Encoded]) -> Gaussian:
        """The normals of `self.image` or `self.text`; `encode` runs the tower."""
        if module is None:
            return encode().gaussian
        encoded, *inputs = last_layer(tower, encode) if isinstance(module, LaplaceProjection) else [encode()]
        given = [at_least_float32(encoded.codes), *inputs] if inputs else [encoded.gaussian.mean]
        with full_precision(given[0]):
            return module(*given)


def with_adapter(config: dict) -> DualEncoder:
    """`DualEncoder(config)`, with the adapter of the configuration, if it has one."""
    model = DualEncoder(config)
    if model.options.adapter is not None:
        model.adapter = Adapter(model.options.adapter, model.embed_dim)
    return model


class Projection(NamedTuple):
    """The last linear map of a tower: weight (D, P), bias (D,) or None, and its module, None for a matrix product."""

    weight: Tensor
    bias: Tensor | None
    layer: nn.Module | None

    @property
    def norm2(self) -> float:
        """Squared norm of the parameters."""
        return sum(x.detach().double().square().sum().item() for x in (self.weight, self.bias) if x is not None)


def last_projection(tower: Encoder) -> Projection:
    """The linear map that makes a tower's embedding. Raises UserError: there is none, or its inputs cannot be read.

    Of SigLIP's images it is the last layer of the pooling's MLP, whose residual is added to the result.
    """
    layer = tower.mean_head.linear if isinstance(tower.mean_head, MaxMeanHead) else tower.mean_head
    if layer is None and isinstance(trunk := getattr(tower, "trunk", None), nn.Module):  # timm's
        *_, layer = [trunk.get_classifier(), *tower.head.children()]
        layer = trunk.attn_pool.mlp if isinstance(layer, nn.Identity) and hasattr(trunk, "attn_pool") else layer
        layer = getattr(layer, "fc2", layer)
    elif layer is None:
        layer = getattr(tower, "text_projection" if hasattr(tower, "text_projection") else "proj", None)
        layer = layer[-1] if isinstance(layer, nn.Sequential) else layer
    if isinstance(layer, nn.Parameter):
        return Projection(layer.T, None, None)
    if not isinstance(layer, nn.Linear):
        raise UserError(
            f"The {type(tower).__name__} does not end in a linear layer whose inputs can be read, as laplace needs.",
            "Choose another method: gaussian, loss-order, asymvlm or probvlm.",
        )
    return Projection(layer.weight, layer.bias, layer)


def last_layer(tower: Encoder, encode: Callable[..., Encoded]) -> tuple[Encoded, Tensor]:
    """A batch with its codes, and the inputs of `last_projection` (B, P), with a trailing 1 where it has a bias."""
    projection, seen = last_projection(tower), []
    handle = projection.layer and projection.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        encoded = encode(want_features=True)
    finally:
        if handle:
            handle.remove()
    inputs = seen[-1] if seen else encoded.features
    inputs = at_least_float32(inputs.pooled if isinstance(inputs, Features) else inputs).flatten(1)
    ones = [inputs.new_ones(len(inputs), 1)] if projection.bias is not None else []
    return encoded, torch.cat([inputs, *ones], 1)
