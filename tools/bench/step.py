"""A pretraining step of PCME++ against a CLIP step of open_clip, with the same size and optimizer.

python -m tools.bench.step --model ViT-B-32 --batch 16
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command


def main() -> None:
    parser = Parser(prog="python -m tools.bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--n-unc-layers", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    options = parser.parse_args()

    import torch

    from tools.bench.timing import report, time_in_turn

    makers = {"open_clip": open_clip_step, "probemb": our_step}
    variants, extra = {}, {}
    for name, make in makers.items():
        torch.manual_seed(0)
        variants[name], parameters = make(options)
        extra[name] = {"parameters": f"{parameters / 1e6:.1f} M"}
    seconds = time_in_turn(variants, options.repeats, warmup=2)
    title = f"training step, {options.model}, batch {options.batch}, {options.n_unc_layers} duplicated block(s) a tower"
    report(title, seconds, "open_clip", "at most 1.15 of open_clip's time with one duplicated block", extra)


def closure(model, loss_of, images, tokens, compiled: bool):
    """A step (forward, loss, backward, AdamW; bfloat16 on a GPU, float32 on a CPU) and the number of parameters."""
    import torch

    from tools.bench.timing import device

    gpu = device() == "cuda"
    model.to(device()).train()
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=gpu)

    def run():
        with torch.autocast(device(), torch.bfloat16, enabled=gpu):
            out = model(images, tokens)
        loss = loss_of(out)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run, sum(p.numel() for p in model.parameters())


def batch_for(size: int, batch: int):
    """Random pixels and tokens."""
    import torch

    from tools.bench.timing import device

    images = torch.randn(batch, 3, size, size, device=device())
    tokens = torch.randint(1, 40_000, (batch, 77), device=device())
    tokens[:, -1] = 49407
    return images, tokens


def open_clip_step(options):
    """open_clip's model and ClipLoss, called as in its trainer."""
    import open_clip
    from open_clip.loss import ClipLoss

    model = open_clip.create_model(options.model, output_dict=True)
    loss = ClipLoss()
    images, tokens = batch_for(model.visual.image_size[0], options.batch)

    def loss_of(out):
        return loss(out["image_features"], out["text_features"], out["logit_scale"])

    return closure(model, loss_of, images, tokens, options.compile)


def our_step(options):
    """PCME++ with its match loss and the CLIP loss."""
    from probemb.losses import clip_loss, pairwise_match_loss
    from probemb.models import create_model

    model = create_model(options.model, n_unc_layers=options.n_unc_layers)
    images, tokens = batch_for(model.image_size, options.batch)

    def loss_of(out):
        match = pairwise_match_loss(out.image, out.text, scale=out.scale, shift=out.shift, vib=1e-4)
        return clip_loss(out.image.mean, out.text.mean, out.logit_scale).loss + match.loss

    return closure(model, loss_of, images, tokens, options.compile)


if __name__ == "__main__":
    run_command(main)
