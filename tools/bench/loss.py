"""Match loss of PCME++, forward and backward, against the (B, B, D) broadcast.

python -m tools.bench.loss --batch 1024 --dim 512
python -m tools.bench.loss --ranks 8 --batch 512 --dim 512    # objectives against open_clip's losses: loss_ranks.py
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="processes; with several, of batch pairs each")
    options = parser.parse_args()
    if options.ranks > 1:
        from tools.bench.loss_ranks import report as report_ranks

        report_ranks(options.ranks, options.batch, options.dim, options.repeats)
        return

    from tools.bench.timing import assert_equal, peak_memory, report, time_in_turn

    b, d = options.batch, options.dim
    makers = {"broadcast": lambda: loss_step(b, d, broadcast_loss), "probemb": lambda: loss_step(b, d, ours)}
    memory = {name: {"peak": f"{peak_memory(make) / 2**20:,.0f} MiB"} for name, make in makers.items()}
    double = peak_memory(lambda: loss_step(2 * b, d, ours)) / 2**20
    memory["probemb"]["peak at 2B"] = f"{double:,.0f} MiB"
    variants = {name: make() for name, make in makers.items()}
    assert_equal(*variants.values())
    seconds = time_in_turn(variants, options.repeats)
    title = f"match loss, forward and backward, B = {b}, D = {d}"
    report(title, seconds, "broadcast", "at most 0.01 of the broadcast's time; memory O(B^2)", memory)


def loss_step(b: int, d: int, loss, log_var: float = -6.0):
    """A closure that computes `loss(image, text).loss` and the gradients of both modalities.

    Args:
        log_var: mean of the random log-variances.
    """
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian
    from tools.bench.timing import device

    g = torch.Generator().manual_seed(0)
    means = [F.normalize(torch.randn(b, d, generator=g), dim=1) for _ in range(2)]
    log_vars = [torch.randn(b, d, generator=g) + log_var for _ in range(2)]
    leaves = [t.to(device()).requires_grad_() for t in (*means, *log_vars)]

    def run():
        out = loss(Gaussian(leaves[0], leaves[2]), Gaussian(leaves[1], leaves[3])).loss
        return out, torch.autograd.grad(out, leaves)

    return run


def broadcast_loss(image, text):
    """Eq. 1 and 2 of PCME++ literally: every pair and every dimension at once."""
    import torch
    from torch.nn import functional as F

    from probemb.losses import LossOutput

    difference = image.mean[:, None, :] - text.mean[None, :, :]  # (B, B, D)
    variance = image.log_var.exp()[:, None, :] + text.log_var.exp()[None, :, :]  # (B, B, D)
    distance = (difference.square() + variance).sum(-1)
    match = torch.eye(len(distance), device=distance.device)
    return LossOutput(2 * F.binary_cross_entropy_with_logits(5 - 5 * distance, match))


def ours(image, text):
    from probemb.losses import pairwise_match_loss

    return pairwise_match_loss(image, text, scale=5, shift=5)


if __name__ == "__main__":
    run_command(main)
