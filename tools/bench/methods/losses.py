"""Losses of many comparisons a pair, forward and backward, against the way in which published code writes them.

python -m tools.bench.methods.losses pvse --batch 128 --dim 1024 --embeddings 4

Each entry of LOSSES makes the variants of one loss; all of them must give the same loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from probemb.cli.command import Parser, run_command

TARGET = "probemb at most 0.05 of the published form's time at B = 128"


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.losses", description=__doc__.splitlines()[0])
    parser.add_argument("losses", nargs="*", default=list(LOSSES), help=f"of {', '.join(LOSSES)}; all by default")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--embeddings", type=int, default=4, help="K of PVSE")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    unknown = [name for name in options.losses if name not in LOSSES]
    if unknown:
        from probemb.errors import UserError

        raise UserError(f"There is no loss '{unknown[0]}' here.", f"Choose from {', '.join(LOSSES)}.")

    from tools.bench.timing import assert_equal, peak_memory, report, time_in_turn

    for name in options.losses:
        title, published, makers = LOSSES[name](options)
        peaks = {variant: {"peak": f"{peak_memory(make) / 2**20:,.0f} MiB"} for variant, make in makers.items()}
        variants = {variant: make() for variant, make in makers.items()}
        assert_equal(*variants.values())
        report(title, time_in_turn(variants, options.repeats), published, TARGET, peaks)


def pvse(options) -> tuple[str, str, dict[str, Callable]]:
    """PVSE with both regularisers: title, the name of the published form, and makers of a step by name."""
    b, k, d = options.batch, options.embeddings, options.dim
    title = f"PVSE's loss, forward and backward, B = {b}, K = {k}, D = {d}"

    def ours():
        from probemb.losses import PVSELoss

        loss = PVSELoss(kernel="unsquared")
        return lambda image, text, *residuals: loss(image, text, None, residuals).loss

    losses = {"written out": lambda: pvse_written_out, "probemb": ours}
    return title, "written out", {name: lambda make=make: pvse_step(b, k, d, make()) for name, make in losses.items()}


def pvse_step(b: int, k: int, d: int, loss):
    """A closure that computes `loss(image, text, image residuals, text residuals)` and all gradients."""
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian
    from tools.bench.timing import device

    g = torch.Generator().manual_seed(0)
    means = [F.normalize(torch.randn(b, k, d, generator=g), dim=2) for _ in range(2)]
    residuals = [torch.randn(b, k, d, generator=g).sigmoid() for _ in range(2)]
    leaves = [x.to(device()).requires_grad_() for x in (*means, *residuals)]

    def run():
        image, text = (Gaussian(x, torch.zeros_like(x)) for x in leaves[:2])
        out = loss(image, text, *leaves[2:])
        return out.detach(), torch.autograd.grad(out, leaves)

    return run


def pvse_written_out(image, text, *residuals):
    """Differences of all points for the discrepancy, a norm for every item's diversity, and pooled similarities."""
    import torch
    from torch.nn import functional as F

    (b, k), points = image.mean.shape[:2], [g.mean.reshape(-1, g.mean.shape[-1]) for g in (image, text)]
    similarity = F.max_pool2d((points[0] @ points[1].T)[None], k)[0]
    own, eye = similarity.diag(), torch.eye(b, dtype=torch.bool, device=similarity.device)
    rows = (0.1 + similarity - own[:, None]).clamp(min=0).masked_fill(eye, 0).max(1).values.mean()
    columns = (0.1 + similarity - own[None, :]).clamp(min=0).masked_fill(eye, 0).max(0).values.mean()

    def diversity(x):
        unit = F.normalize(x, dim=2)
        off = ~torch.eye(k, dtype=torch.bool, device=x.device)
        return torch.stack([(item @ item.T * off).norm() / k**2 for item in unit]).mean()

    def kernel(x, y):
        return (-0.5 * (x[:, None] - y[None]).norm(dim=2)).exp()  # (B K, B K, D) differences

    mmd = (kernel(points[0], points[0]) - 2 * kernel(*points) + kernel(points[1], points[1])).mean()
    return rows + columns + 0.1 * sum(map(diversity, residuals)) + 0.01 * mmd


def order(options) -> tuple[str, str, dict[str, Callable]]:
    """The order embeddings' loss."""
    from tools.bench.loss import loss_step

    b, d = options.batch, options.dim

    def written_out(image, text):
        import torch

        from probemb.losses import LossOutput

        excess = text.mean.abs()[None] - image.mean.abs()[:, None]  # (B, B, D)
        similarity = -excess.clamp(min=0).square().sum(2)
        own, eye = similarity.diag(), torch.eye(b, dtype=torch.bool, device=similarity.device)
        hinges = [(0.05 + similarity - x).clamp(min=0).masked_fill(eye, 0).sum() for x in (own[:, None], own[None])]
        return LossOutput(sum(hinges) + 0 * (image.log_var.sum() + text.log_var.sum()))

    def ours(image, text):
        from probemb.losses import LossOutput, OrderLoss

        return LossOutput(OrderLoss()(image, text).loss + 0 * (image.log_var.sum() + text.log_var.sum()))

    makers = {"broadcast": lambda: loss_step(b, d, written_out), "probemb": lambda: loss_step(b, d, ours)}
    return f"order embeddings' loss, forward and backward, B = {b}, D = {d}", "broadcast", makers


LOSSES = {"pvse": pvse, "order": order}

if __name__ == "__main__":
    run_command(main)
