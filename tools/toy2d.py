"""Optimise points in a plane under every training distance.

    python -m tools.toy2d                          # all losses, a table and toy2d.png
    python -m tools.toy2d --distance csd --seeds 5

Three classes of 500 points; 150 of each are confusable: whenever one is drawn, its class is its own or another one at
random. The parameters are mean and log-variance of every point; the loss is PCME++'s match loss between the points of a
batch. Under a suitable distance the confusable points get the larger variance. Beside it stands VSE's triplet loss,
with the hardest negative and with all, of pairs of a point and another one of its class; it moves the means alone.
Source: PCME++ §A.2 (Adam 0.02, 500 epochs, batch 128). Chosen here, as the paper does not state them: centroids on a
circle of radius 2, points from N(centroid, I), log-variances from U(1/2, 3/2), a and b learned from 1; for the triplets
margin 0.2 and the Euclidean distance of the means.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jsonargparse.typing import PositiveInt
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from probemb import Gaussian
from probemb.cli.command import Parser, run_command
from probemb.distances import DISTANCES
from probemb.files import writing
from probemb.losses import pairwise_match_loss
from probemb.losses.triplet import triplet_loss

CLASSES, POINTS, CONFUSABLE = 3, 500, 150
PAPER = {"csd": "1.68 / 3.05", "wasserstein2": "2.69 / 2.80"}
TRIPLETS = {"triplet": False, "triplet-hardest": True}  # whether the hardest negative alone counts
MARGIN = 0.2


class Toy(NamedTuple):
    """The optimised points.

    own, other    (P,) classes; the same for certain points
    mean          (P, 2)
    variance      (P,) mean of both variances
    """

    own: Tensor
    other: Tensor
    mean: Tensor
    variance: Tensor

    @property
    def variances(self) -> tuple[float, float]:
        """Mean variance of certain and of confusable points."""
        confusable = self.own != self.other
        return float(self.variance[~confusable].mean()), float(self.variance[confusable].mean())

    @property
    def places(self) -> tuple[float, float]:
        """Shares of certain points that lie closest to the centre of their class, and of confusable points whose two
        closest centres are those of their two classes; centres are those of the certain points.
        """
        certain = self.own == self.other
        centres = torch.stack([self.mean[certain & (self.own == c)].mean(0) for c in range(CLASSES)])
        order = torch.cdist(self.mean, centres).argsort(1)
        two = (order[:, :2].sort(1).values == torch.stack([self.own, self.other], 1).sort(1).values).all(1)
        return float((order[:, 0] == self.own)[certain].double().mean()), float(two[~certain].double().mean())


def train(distance: str, seed: int = 0, epochs: int = 500, batch: int = 128, lr: float = 0.02) -> Toy:
    """Optimise the points under the match loss of one distance, or a loss in TRIPLETS."""
    g = torch.Generator().manual_seed(seed)
    own = torch.arange(CLASSES).repeat_interleave(POINTS)
    confusable = torch.arange(POINTS).repeat(CLASSES) < CONFUSABLE
    other = torch.where(confusable, (own + 1) % CLASSES, own)
    angle = 2 * math.pi * torch.arange(CLASSES) / CLASSES
    centroid = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    mean = (centroid[own] + torch.randn(len(own), 2, generator=g)).requires_grad_()
    log_var = (0.5 + torch.rand(len(own), 2, generator=g)).requires_grad_()
    scale, shift = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([mean, log_var, scale, shift], lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(own), generator=g).split(batch):
            swapped = torch.rand(len(rows), generator=g) < 0.5
            label = torch.where(swapped, other[rows], own[rows])
            match = (label[:, None] == label[None, :]).float()
            points = Gaussian(mean[rows], log_var[rows])
            if distance in TRIPLETS:
                others = match - torch.eye(len(rows))  # a batch's last part may hold a class once
                mate = (others + 1e-9).multinomial(1, generator=g).flatten()
                similarity = -(points.mean[:, None] - points.mean[mate]).square().sum(-1).clamp_min(1e-12).sqrt()
                loss = triplet_loss(similarity, match[:, mate], MARGIN, TRIPLETS[distance]).loss
            else:
                loss = pairwise_match_loss(points, points, match, scale=scale, shift=shift, distance=distance).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Toy(own, other, mean.detach(), log_var.detach().exp().mean(1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.toy2d", description="Uncertainty of points in a plane, by training distance.")
    known = f"a training distance, {' or '.join(TRIPLETS)} (default: csd, wasserstein2 and both triplets)"
    parser.add_argument("--distance", action="append", choices=[*DISTANCES, "match-probability", *TRIPLETS], help=known)
    parser.add_argument("--seeds", type=PositiveInt, default=3, help="draws of the points (default: 3)")
    parser.add_argument("--epochs", type=PositiveInt, default=500, help="passes over the points (default: 500)")
    parser.add_argument("--out", type=Path, default=Path("toy2d.png"), help="picture (default: toy2d.png)")
    options = parser.parse_args(argv)
    distances = options.distance or ["csd", "wasserstein2", *TRIPLETS]
    torch.set_num_threads(1)
    title = f"mean variance, and points at the right classes in percent; {options.seeds} seeds, {options.epochs} epochs"
    table = Table("distance", title=title)
    for heading in ("certain", "confusable", "ratio", "paper", "certain at own", "confusable between"):
        table.add_column(heading, justify="right")
    figure = Figure(figsize=(4 * len(distances), 4), layout="constrained")
    for panel, distance in enumerate(distances):
        toys = [train(distance, seed, options.epochs) for seed in range(options.seeds)]
        draw(figure.add_subplot(1, len(distances), panel + 1, title=distance, aspect="equal"), toys[0])
        certain, confusable = torch.tensor([toy.variances for toy in toys]).T
        found = [f"{x.mean():.2f}" for x in (certain, confusable, confusable / certain)]
        places = [f"{100 * x:.1f}" for x in torch.tensor([toy.places for toy in toys]).mean(0)]
        table.add_row(distance, *(["–"] * 3 if distance in TRIPLETS else found), PAPER.get(distance, "–"), *places)
    with writing(options.out):
        figure.savefig(options.out, dpi=150)
    Console(width=100).print(table)
    print(f"written: {options.out}", flush=True)
    return 0


def draw(axes, toy: Toy) -> None:
    """Points as discs of an area in proportion to their variance, confusable ones in blue."""
    confusable = toy.own != toy.other
    for name, chosen, colour in (("certain", ~confusable, "grey"), ("confusable", confusable, "tab:blue")):
        axes.scatter(*toy.mean[chosen].T, s=3 * toy.variance[chosen], c=colour, alpha=0.5, linewidths=0, label=name)
    axes.legend()


if __name__ == "__main__":
    run_command(main)
