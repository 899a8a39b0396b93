"""Precomputed regions of an image: SCAN's linear map, and VSRN's graph reasoning with a GRU over the regions.

    regions ── linear maps ─┬─ graph layer 1 … G ─┬─ GRU ─────── mean          (VSRN: the GRU's last state)
                            │                     └─ its own GRU ─ log_var head ─ log_var
                            └─ without graph and GRU: tokens, and their average  (SCAN)

Sources: SCAN (Lee et al., ECCV 2018) §3.1; VSRN (Li et al., ICCV 2019) §3.1, 3.2; probabilistic VSRN §3. In place of
VSRN's batch norm on W_r regions have unit length in front of every layer: the update is cubic in them.
Shapes: B images, R regions, F features of a region, W width.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.models.encoder import BothFeatures, Encoder, last_blocks
from probemb.models.heads import Features, start_mean
from probemb.models.options import ModelOptions


class RegionTower(Encoder):
    """Regions (B, R, F) float, zeros for one that does not exist; `region_shape`, (R, F), is what the data must have.

    `hidden` are widths of linear maps with ReLU before the last one. A `gru` pools the regions, or their average.
    """

    def __init__(
        self, o: ModelOptions, n_unc_layers: int, regions: int = 36, features: int = 2048, width: int = 1024,
        hidden: Sequence[int] = (), graph_layers: int = 0, gru: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.region_shape, self.n_tokens = (regions, features), regions
        self.maps = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise((features, *hidden, width)))
        self.graph = nn.ModuleList(GraphLayer(width) for _ in range(graph_layers))
        self.gru = nn.GRU(width, width, batch_first=True) if gru else None
        self.branch = None
        if last_blocks(self.maps[-1:], n_unc_layers):
            self.branch = nn.GRU(width, width, batch_first=True) if gru else nn.Linear(self.maps[-1].in_features, width)
        for linear in (*self.maps, *([self.branch] if isinstance(self.branch, nn.Linear) else [])):
            start_mean(linear)
        self.blocks = [*(f"maps.{i}" for i in range(len(self.maps))), *(f"graph.{i}" for i in range(graph_layers))]
        self.blocks += ["gru"] * gru
        self.branch_blocks = ["branch"]
        # Head "clip" keeps the pooled features where they are of size D.
        self.add_heads(o, width, width, own_projection=width == o.embed_dim)

    def features(self, regions: Tensor) -> BothFeatures:
        mask = existing(regions)
        x = regions.to(self.maps[0].weight.dtype)
        for linear in self.maps[:-1]:
            x = linear(x).relu()
        reasoned = self._reason(self.maps[-1](x), mask)
        mean = self._pooled(reasoned, mask, self.gru)
        if not self.options.probabilistic:
            return mean, None
        if self.gru is None and self.branch is not None:
            reasoned = self._reason(self.branch(x), mask)
        return mean, self._pooled(reasoned, mask, self.gru and (self.branch or self.gru))

    def _reason(self, x: Tensor, mask: Tensor) -> Tensor:
        """The graph layers, with regions of unit length in front of each and behind the last one."""
        x = x * mask[..., None]
        for layer in self.graph:
            x = layer(F.normalize(x, dim=-1), mask)
        return F.normalize(x, dim=-1) if len(self.graph) else x

    def _pooled(self, x: Tensor, mask: Tensor, gru: nn.GRU | None) -> Features:
        if gru is None:
            return Features(x, x.sum(1) / mask.sum(1, keepdim=True), mask)
        with torch.autocast(x.device.type, enabled=False):  # recurrences lose precision in bfloat16
            states = gru(x.to(gru.weight_hh_l0.dtype))[0]
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
        return Features(x, states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0], mask)

    def targets(self, inputs: Tensor, features: Features, of_tokens: bool) -> Tensor:
        """The regions (B, R, F), or their average (B, F)."""
        return inputs if of_tokens else inputs.sum(1) / existing(inputs).sum(1, keepdim=True)

    def target_width(self, of_tokens: bool) -> int:
        return self.region_shape[1]


class GraphLayer(nn.Module):
    """V + W_r (A V W_g), A_ij = (W_phi v_i) · (W_theta v_j) / R: a residual graph convolution (VSRN Eq. 2, 3)."""

    def __init__(self, width: int):
        super().__init__()
        self.phi, self.theta, self.g, self.out = (nn.Linear(width, width) for _ in range(4))
        for linear in (self.phi, self.theta, self.g):
            start_mean(linear)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, R, W) and (B, R) bool -> (B, R, W), zeros for regions that do not exist."""
        affinity = self.phi(x) @ self.theta(x).transpose(1, 2)
        affinity = affinity * mask[:, None] / mask.sum(1)[:, None, None]
        return (x + self.out(affinity @ self.g(x))) * mask[..., None]


def existing(regions: Tensor) -> Tensor:
    """Mask of the regions that are not all zeros, (B, R) bool; for an image without any, the first."""
    mask = (regions != 0).any(-1)
    mask[:, 0] |= ~mask.any(1)
    return mask
