"""Optimise points in a plane directly, to compare the uncertainties that training distances lead to.

    python -m tools.toy2d                          # all losses, a table and toy2d.html
    python -m tools.toy2d --distance csd --seeds 5

Three classes of 500 points; 150 of each are confusable: whenever one is drawn, its class is its own or another one at
random. The parameters are mean and log-variance of every point; the loss is PCME++'s match loss between the points of a
batch. Under a suitable distance the confusable points get the larger variance. Beside it stands VSE's triplet loss,
with the hardest negative and with all, of pairs of a point and another one of its class in the batch; it moves the
means alone.
Source: PCME++ §A.2 (Adam 0.02, 500 epochs, batch 128), which reports mean variances of 1.68 and 3.05 for certain and
confusable points under CSD, and 2.69 and 2.80 under 2-Wasserstein. Chosen here, as the paper does not state them:
centroids on a circle of radius 2, points from N(centroid, I), log-variances from U(1/2, 3/2), a and b learned from 1;
for the triplets margin 0.2 and the Euclidean distance of the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

GENERATOR = "probemb tools.toy2d"
CLASSES, POINTS, CONFUSABLE = 3, 500, 150
PAPER = {"csd": (1.68, 3.05), "wasserstein2": (2.69, 2.80)}
TRIPLETS = {"triplet": False, "triplet-hardest": True}  # whether the hardest negative alone counts
MARGIN = 0.2


class Toy(NamedTuple):
    """The optimised points, on the CPU.

    own, other    (P,) classes; the same for certain points
    mean          (P, 2)
    variance      (P,) mean of both variances
    """

    own: object
    other: object
    mean: object
    variance: object

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
        import torch

        certain = self.own == self.other
        centres = torch.stack([self.mean[certain & (self.own == c)].mean(0) for c in range(CLASSES)])
        order = torch.cdist(self.mean, centres).argsort(1)
        two = (order[:, :2].sort(1).values == torch.stack([self.own, self.other], 1).sort(1).values).all(1)
        return float((order[:, 0] == self.own)[certain].double().mean()), float(two[~certain].double().mean())


def train(distance: str, seed: int = 0, epochs: int = 500, batch: int = 128, lr: float = 0.02) -> Toy:
    """Optimise the points under the match loss of one distance, or a loss in TRIPLETS."""
    import math

    import torch

    from probemb import Gaussian
    from probemb.losses import pairwise_match_loss, triplet_loss

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
    parser.add_argument(
        "--distance",
        action="append",
        help=f"a training distance, {' or '.join(TRIPLETS)} (default: csd, wasserstein2 and both triplets)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="draws of the points (default: 3)")
    parser.add_argument("--epochs", type=int, default=500, help="passes over the points (default: 500)")
    parser.add_argument("--out", type=Path, default=Path("toy2d.html"), help="picture (default: toy2d.html)")
    options = parser.parse_args(argv)
    for name in ("seeds", "epochs"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)}.", "Give at least 1.")

    import torch
    from rich.console import Console
    from rich.table import Table

    from probemb.cli.results import claim_files
    from probemb.distances import get_distance

    distances = options.distance or ["csd", "wasserstein2", *TRIPLETS]
    for distance in distances:
        if distance not in TRIPLETS:
            get_distance(distance)
    claim_files(options.out.absolute().parent, [options.out.name], GENERATOR)
    torch.set_num_threads(1)
    title = f"mean variance, and points at the right classes in percent; {options.seeds} seeds, {options.epochs} epochs"
    table = Table(title=title)
    for heading in ("distance", "certain", "confusable", "ratio", "paper", "certain at own", "confusable between"):
        table.add_column(heading, justify="left" if heading == "distance" else "right")
    drawn = []
    for distance in distances:
        toys = []
        for seed in range(options.seeds):
            print(f"{distance}, seed {seed} …", flush=True)
            toys.append(train(distance, seed, options.epochs))
        drawn.append((distance, toys[0]))
        certain, confusable = (torch.tensor([toy.variances[i] for toy in toys]) for i in (0, 1))
        paper = " / ".join(f"{v:.2f}" for v in PAPER.get(distance, ())) or "–"
        found = (certain.mean(), confusable.mean(), (confusable / certain).mean())
        variances = ["–"] * 3 if distance in TRIPLETS else [f"{value:.2f}" for value in found]
        places = [f"{100 * sum(toy.places[i] for toy in toys) / len(toys):.1f}" for i in (0, 1)]
        table.add_row(distance, *variances, paper, *places)
    Console(width=100).print(table)
    draw(options.out, drawn)
    print(f"written: {options.out}", flush=True)
    return 0


def draw(path: Path, toys: Sequence[tuple[str, Toy]]) -> None:
    """Write a page with a chart of each distance's first seed; radius: standard deviation, of triplets all alike."""
    from probemb.reports.figures import BLUE, GREY, Chart
    from probemb.reports.pages import write_page

    sections = []
    for distance, toy in toys:
        chart = Chart(f"toy2d-{distance}", x_label="mean, first dimension", y_label="mean, second dimension")
        confusable = toy.own != toy.other
        for name, chosen, colour in (("certain", ~confusable, GREY), ("confusable", confusable, BLUE)):
            rows = zip(toy.mean[chosen].tolist(), toy.variance[chosen].tolist(), toy.own[chosen].tolist())
            if distance in TRIPLETS:
                points = [(x, y, 2, f"class {own + 1}") for (x, y), _, own in rows]
            else:
                points = [(x, y, 2.2 * v**0.5, f"class {own + 1}, variance {v:.2f}") for (x, y), v, own in rows]
            chart.cloud(points, name, colour)
        sections.append((distance, None if distance in TRIPLETS else toy.variances, toy.places, chart))
    write_page(path, Path(__file__).with_name("toy2d.html"), GENERATOR, sections=sections)


if __name__ == "__main__":
    run_command(main)
