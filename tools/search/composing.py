"""One normal from the parts of a query: with the composer that the model was trained with, else with their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.compose import Product
    from probemb.gaussian import Gaussian


class QueryComposer:
    """Composes queries of a model.

    Attributes:
        name: in `probemb.models.composers`; "product" for a model without a trained composer.
        trained: whether the model was trained with it.
        weighs: whether parts can have weights, and be taken away.
        measure: what says how well parts go together, "log_normaliser" or "uncertainty"; None without variances.
    """

    def __init__(self, model):
        self._module = getattr(model, "composer", None)
        self.trained = self._module is not None
        self.name = model.config["composer"] if self.trained else "product"
        self.weighs = not self.trained or self._module.weighs
        has_variances = self._module.probabilistic if self.trained else True
        self.measure = None
        if has_variances and getattr(model, "probabilistic", True):
            normalises = not self.trained or self._module.normalises
            self.measure = "log_normaliser" if normalises else "uncertainty"

    def __call__(self, parts: Gaussian, weights: Sequence[float] | None = None) -> Product:
        """Compose parts (K, D), or (K, N, D) for N queries; on the CPU.

        Args:
            weights: (K,), see `probemb.compose.compose`; below 0 a part is taken away.

        Returns:
            (D,) or (N, D). Compositions of points have the variances of points.

        Raises:
            UserError: weights for a composer without, or no variance left.
        """
        import torch

        from probemb.compose import Product, compose
        from probemb.gaussian import Gaussian
        from probemb.models import POINT_LOG_VAR

        if not self.trained:
            return compose(parts, weights=weights)
        if parts.mean.dim() == 2:
            product = self(Gaussian(parts.mean[:, None], parts.log_var[:, None]), weights)
            return Product(product.gaussian[0], product.log_normaliser[0])
        given = Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1))
        device = next((one.device for one in self._module.parameters()), parts.mean.device)
        with torch.no_grad():
            product = self._module(given.to(device), weights)
        composed = product.gaussian.to("cpu")
        if not self._module.probabilistic:
            composed = Gaussian(composed.mean, torch.full_like(composed.mean, POINT_LOG_VAR))
        return Product(composed, product.log_normaliser.cpu())

    def agreement(self, product: Product) -> Tensor | None:
        """Score of how well the parts of compositions (N, D) go together, (N,), higher is better; None if unknown."""
        if self.measure is None:
            return None
        return product.log_normaliser if self.measure == "log_normaliser" else -product.gaussian.uncertainty()
