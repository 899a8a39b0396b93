"""A PCME++ training step against PCME's with 8 samples: the loss alone, and with a model.

python -m tools.bench.methods.training_losses --batch 128 --dim 1024 --model ViT-Micro-32

The second ratio depends on the model: the larger the towers, the closer to 1.
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.training_losses", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--model", default="ViT-Micro-32")
    parser.add_argument("--repeats", type=int, default=5)
    loops = "time PCME's loops over samples too (minutes on a CPU)"
    parser.add_argument("--written-out", action="store_true", help=loops)
    options = parser.parse_args()

    from tools.bench.loss import loss_step
    from tools.bench.timing import assert_equal, peak_memory, report, time_in_turn

    b, d = options.batch, options.dim
    losses = {"PCME": pcme, "PCME++": pcmepp}
    alone = losses | ({"PCME written out": pcme_written_out} if options.written_out else {})
    peaks = {name: peak_memory(lambda make=make: loss_step(b, d, make(), -8.0)) for name, make in alone.items()}
    memory = {name: {"peak": f"{peak / 2**20:,.0f} MiB"} for name, peak in peaks.items()}
    assert_equal(loss_step(16, 32, pcme(), -8.0), loss_step(16, 32, pcme_written_out(), -8.0), atol=1e-4)
    target = "PCME++ at most 0.8 of PCME's time"
    variants = {name: loss_step(b, d, make(), -8.0) for name, make in alone.items()}
    title = f"the loss, forward and backward, B = {b}, D = {d}, 8 samples"
    report(title, time_in_turn(variants, options.repeats), "PCME", target, memory)

    variants = {name: model_step(options.model, b, d, make) for name, make in losses.items()}
    title = f"training step of {options.model}, B = {b}, D = {d}, 8 samples"
    report(title, time_in_turn(variants, options.repeats), "PCME", target)


def pcmepp():
    """The recipe's loss: all pairs, pseudo-positives, bottleneck."""
    from probemb.losses import PairwiseMatchLoss
    from tools.bench.timing import device

    return PairwiseMatchLoss().to(device())


def pcme():
    import torch

    from probemb.losses import PCMELoss
    from tools.bench.timing import device

    loss, noise = PCMELoss().to(device()), torch.Generator(device()).manual_seed(0)
    return lambda image, text: loss(image, text, generator=noise)


def pcme_written_out():
    """The definition of PCME's loss: a loop over pairs of samples, each with a (B, B, D) difference."""
    import torch
    from torch.nn import functional as F

    from probemb.losses import LossOutput, vib_kl
    from tools.bench.timing import device

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


def model_step(name: str, b: int, d: int, make):
    """A closure of forward, loss, backward and optimizer; the model is the same for every loss."""
    import torch

    from probemb.models import create_model
    from tools.bench.step import batch_for, closure

    torch.manual_seed(0)
    model = create_model(name, embed_dim=d, head="gpo")
    images, tokens = batch_for(model.image_size, b)
    tokens = tokens[:, -model.context_length :]
    loss = make()
    return closure(model, lambda out: loss(out.image, out.text).loss, images, tokens, False)[0]


if __name__ == "__main__":
    run_command(main)
