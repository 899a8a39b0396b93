"""PCME + addition: the sum of the parts as independent random variables. No parameters."""

from __future__ import annotations

from probemb.compose import Product
from probemb.gaussian import Gaussian
from probemb.models.composers.composer import Composer


class AdditionComposer(Composer):
    """Means and variances add up. Source: MPC Eq. 9."""

    def compose_parts(self, parts: Gaussian) -> Product:
        mean, log_var = parts.mean.sum(1), parts.log_var.logsumexp(1)
        return Product(Gaussian(mean, log_var), mean.new_zeros(len(mean)))
