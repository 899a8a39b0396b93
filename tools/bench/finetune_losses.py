"""A PCME++ training step against PCME's with 8 samples: the loss alone, and with a model.

python -m tools.bench.finetune_losses --batch 128 --dim 1024 --model ViT-Micro-32

The second ratio depends on the model: the larger the towers, the closer to 1.
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.finetune_losses", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--model", default="ViT-Micro-32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--written-out", action="store_true", help="time PCME's loops over samples too (minutes on a CPU)"
    )
    options = parser.parse_args()

    from tools.bench.timing import peak_memory, report, time_in_turn

    b, d = options.batch, options.dim
    losses = {"PCME": pcme, "PCME++": pcmepp}
    alone = losses | ({"PCME written out": pcme_written_out} if options.written_out else {})
    peaks = {name: peak_memory(lambda make=make: loss_step(b, d, make)) for name, make in alone.items()}
    memory = {name: {"peak": f"{peak / 2**20:,.0f} MiB"} for name, peak in peaks.items()}
    assert_equal(loss_step(16, 32, pcme), loss_step(16, 32, pcme_written_out))
    target = "PCME++ at most 0.8 of PCME's time"
    variants = {name: loss_step(b, d, make) for name, make in alone.items()}
    title = f"the loss, forward and backward, B = {b}, D = {d}, 8 samples"
    report(title, time_in_turn(variants, options.repeats), "PCME", target, memory)

    variants = {name: model_step(options.model, b, d, make) for name, make in losses.items()}
    title = f"training step of {options.model}, B = {b}, D = {d}, 8 samples"
    report(title, time_in_turn(variants, options.repeats), "PCME", target)


def pcmepp():
    """The recipe's own: all pairs, pseudo-positives, bottleneck."""
    from probemb.losses import PairwiseMatchLoss

    return PairwiseMatchLoss()


def pcme():
    """The library's."""
    import torch

    from probemb.losses import PCMELoss

    loss, noise = PCMELoss(), torch.Generator(device()).manual_seed(0)
    return lambda image, text: loss(image, text, generator=noise)


def pcme_written_out():
    """The definition as it stands: one (B, B, D) difference for every pair of samples, one after the other."""
    import torch
    from torch.nn import functional as F

    from probemb.losses import LossOutput, vib_kl

    noise = torch.Generator(device()).manual_seed(0)

    def loss(image, text):
        z_i, z_t = image.sample(8, noise), text.sample(8, noise)
        distances = [
            ((z_i[:, j, None] - z_t[None, :, k]).square().sum(-1) + 1e-6).sqrt() for j in range(8) for k in range(8)
        ]
        sign = 2 * torch.eye(len(z_i), device=z_i.device) - 1
        log_p = F.logsigmoid(2 * sign[..., None] * (5 - 5 * torch.stack(distances, -1)))  # (B, B, 64)
        nll = torch.log(torch.tensor(64.0)) - log_p.logsumexp(-1)
        return LossOutput(2 * nll.sum() + 1e-3 * (vib_kl(image) + vib_kl(text)))

    return loss


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def loss_step(b: int, d: int, make):
    """A closure that computes the loss and the gradients of both modalities."""
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian

    g = torch.Generator().manual_seed(0)
    mean = [F.normalize(torch.randn(b, d, generator=g), dim=1) for _ in range(2)]
    log_var = [torch.randn(b, d, generator=g) - 8 for _ in range(2)]
    leaves = [t.to(device()).requires_grad_() for t in (*mean, *log_var)]
    loss = make()
    if isinstance(loss, torch.nn.Module):
        loss.to(device())

    def run():
        out = loss(Gaussian(leaves[0], leaves[2]), Gaussian(leaves[1], leaves[3])).loss
        return out, torch.autograd.grad(out, leaves)

    return run


def model_step(name: str, b: int, d: int, make):
    """A closure of forward, loss, backward and optimizer, with the same model for every loss."""
    import torch

    from probemb.models import create_model
    from tools.bench.step import batch_for, closure

    torch.manual_seed(0)
    model = create_model(name, embed_dim=d, head="gpo")
    images, tokens = batch_for(model.image_size, b, torch.device(device()))
    tokens = tokens[:, -model.context_length :]
    loss = make()
    if isinstance(loss, torch.nn.Module):
        loss.to(device())
    return closure(model, lambda out: loss(out.image, out.text).loss, images, tokens, torch.device(device()), False)[0]


def assert_equal(first, second) -> None:
    """A comparison of speed means something only between equal results: the same noise, the same loss and gradients."""
    import torch

    (loss_a, grads_a), (loss_b, grads_b) = first(), second()
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-4, atol=1e-4)
    for x, y in zip(grads_a, grads_b):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    run_command(main)
