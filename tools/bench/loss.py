"""CSD + match loss, forward and backward, against the (B, B, D) broadcast written out.

python -m tools.bench.loss --batch 1024 --dim 512
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    from tools.bench.timing import peak_memory, report, time_in_turn

    b, d = options.batch, options.dim
    makers = {"broadcast": lambda: step(b, d, broadcast_loss), "probemb": lambda: step(b, d, ours)}
    memory = {name: {"peak": f"{peak_memory(make) / 2**20:,.0f} MiB"} for name, make in makers.items()}
    double = peak_memory(lambda: step(2 * b, d, ours)) / 2**20
    memory["probemb"]["peak at 2B"] = f"{double:,.0f} MiB"
    variants = {name: make() for name, make in makers.items()}
    assert_equal(variants)
    seconds = time_in_turn(variants, options.repeats)
    title = f"match loss, forward and backward, B = {b}, D = {d}"
    report(title, seconds, "broadcast", "at most 0.01 of the broadcast's time; memory O(B^2)", memory)


def step(b: int, d: int, loss_of):
    """A closure that computes the loss and the gradients of all inputs."""
    import torch
    from torch.nn import functional as F

    g = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean = [F.normalize(torch.randn(b, d, generator=g), dim=1) for _ in range(2)]
    log_var = [torch.randn(b, d, generator=g) - 6 for _ in range(2)]
    leaves = [t.to(device).requires_grad_() for t in (*mean, *log_var)]

    def run():
        loss = loss_of(*leaves)
        return loss, torch.autograd.grad(loss, leaves)

    return run


def broadcast_loss(mu_i, mu_t, log_var_i, log_var_t):
    """Eq. 1 and 2 of PCME++ as they stand: every pair and every dimension at once."""
    import torch
    from torch.nn import functional as F

    difference = mu_i[:, None, :] - mu_t[None, :, :]  # (B, B, D)
    variance = log_var_i.exp()[:, None, :] + log_var_t.exp()[None, :, :]  # (B, B, D)
    distance = (difference.square() + variance).sum(-1)
    return 2 * F.binary_cross_entropy_with_logits(5 - 5 * distance, torch.eye(len(mu_i), device=mu_i.device))


def ours(mu_i, mu_t, log_var_i, log_var_t):
    """The library's."""
    from probemb import Gaussian
    from probemb.losses import pairwise_match_loss

    return pairwise_match_loss(Gaussian(mu_i, log_var_i), Gaussian(mu_t, log_var_t), scale=5, shift=5).loss


def assert_equal(variants: dict) -> None:
    """A comparison of speed means something only between equal results."""
    import torch

    (loss_a, grads_a), (loss_b, grads_b) = (run() for run in variants.values())
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-4, atol=1e-5)
    for x, y in zip(grads_a, grads_b):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-6)


if __name__ == "__main__":
    run_command(main)
