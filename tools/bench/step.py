"""A pretraining step of PCME++ against the CLIP step of open_clip's own model and loss, same size, same optimizer.

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

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    makers = {"open_clip": open_clip_step, "probemb": our_step}
    variants, extra = {}, {}
    for name, make in makers.items():
        torch.manual_seed(0)
        variants[name], parameters = make(options, device)
        extra[name] = {"parameters": f"{parameters / 1e6:.1f} M"}
    seconds = time_in_turn(variants, options.repeats, warmup=2)
    title = f"training step, {options.model}, batch {options.batch}, {options.n_unc_layers} duplicated block(s) a tower"
    report(title, seconds, "open_clip", "at most 1.15 of open_clip's time with one duplicated block", extra)


def closure(model, loss_of, images, tokens, device, compiled: bool):
    """Forward, loss, backward and AdamW under autocast on a GPU, in float32 on a CPU."""
    import torch

    model.to(device).train()
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def run():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(images, tokens)
        loss = loss_of(out)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run, sum(p.numel() for p in model.parameters())


def batch_for(size: int, batch: int, device):
    """Random pixels and tokens."""
    import torch

    images = torch.randn(batch, 3, size, size, device=device)
    tokens = torch.randint(1, 40_000, (batch, 77), device=device)
    tokens[:, -1] = 49407
    return images, tokens


def open_clip_step(options, device):
    """open_clip's model and ClipLoss as its own trainer calls them."""
    import open_clip
    from open_clip.loss import ClipLoss

    model = open_clip.create_model(options.model, output_dict=True)
    loss = ClipLoss()
    images, tokens = batch_for(model.visual.image_size[0], options.batch, device)

    def loss_of(out):
        return loss(out["image_features"], out["text_features"], out["logit_scale"])

    return closure(model, loss_of, images, tokens, device, options.compile)


def our_step(options, device):
    """PCME++ with the CLIP loss beside it."""
    from probemb.losses import clip_loss, pairwise_match_loss
    from probemb.models import create_model

    model = create_model(options.model, n_unc_layers=options.n_unc_layers)
    images, tokens = batch_for(model.image_size, options.batch, device)

    def loss_of(out):
        match = pairwise_match_loss(out.image, out.text, scale=out.scale, shift=out.shift, vib=1e-4)
        return clip_loss(out.image.mean, out.text.mean, out.logit_scale).loss + match.loss

    return closure(model, loss_of, images, tokens, device, options.compile)


if __name__ == "__main__":
    run_command(main)
