"""Embedding shards against a plain open_clip loop on the same shards.

    python -m tools.bench.embedding --model ViT-B-32 --images 256

The loop is the usual one: webdataset's stages, open_clip's transform and tokenizer in worker processes, captions at
full context length, results in memory. It runs with this project's model and with open_clip's of the same
architecture, which has no uncertainty blocks. tools.embed also writes its partitions. Each repeat restarts everything
except for loading the model, in turn.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Workers


def main() -> None:
    parser = Parser(prog="python -m tools.bench.embedding", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B-32", help="name of an architecture (%(default)s)")
    parser.add_argument("--images", type=int, default=256, help="in four shards (%(default)s)")
    parser.add_argument("--size", type=int, default=512, help="pixels of the JPEGs' sides (%(default)s)")
    parser.add_argument("--items", nargs="+", choices=("image", "both"), default=["image", "both"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=Workers, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    import open_clip

    from probemb.cli.device import choose_device
    from probemb.models import LoadedModel, create_model, create_tokenizer, create_transforms
    from tools.bench.loader import draw_shards
    from tools.bench.timing import report, time_in_turn

    device = choose_device("auto", "auto")
    model = create_model(options.model).to(device.name).eval()
    stock = open_clip.create_model(options.model).to(device.name).eval()
    loaded = LoadedModel(model, create_tokenizer(model), create_transforms(model))
    transform = open_clip.image_transform(model.image_size, is_train=False)
    tokenizer = open_clip.get_tokenizer(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        shards = Path(scratch) / "shards"
        shards.mkdir()
        draw_shards(shards, options.size, options.images)
        for items in options.items:
            captions = items == "both"
            run_loop = partial(
                loop, transform=transform, tokenizer=tokenizer, shards=shards, captions=captions, options=options,
                device=device,
            )  # fmt: skip
            variants = {
                "open_clip loop": partial(run_loop, stock),
                "its loop, this model": partial(run_loop, model),
                "tools.embed": partial(ours, loaded, shards, items, options, device),
            }
            seconds = time_in_turn(variants, options.repeats, warmup=1)
            rates = {name: {"images/s": f"{options.images / median(times):,.1f}"} for name, times in seconds.items()}
            title = f"{options.model}, {options.images} JPEGs of {options.size} px, {items}, {options.workers} workers"
            target = "tools.embed at most the time of the loop with this model (images/s at least 1.0)"
            report(title, seconds, "its loop, this model", target, rates)


def loop(model, transform, tokenizer, shards: Path, captions: bool, options: Namespace, device) -> list:
    """One pass over the shards; returns the embeddings of every batch on the CPU."""
    import torch
    import webdataset as wds

    dataset = wds.DataPipeline(
        wds.SimpleShardList(sorted(map(str, shards.glob("*.tar")))),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.decode("pilrgb"),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=transform, text=lambda text: tokenizer([text])[0]),
        wds.to_tuple("image", "text"),
        wds.batched(options.batch, partial=True),
    )
    found = []
    with torch.inference_mode(), device.autocast():
        for images, tokens in wds.WebLoader(
            dataset, batch_size=None, num_workers=options.workers, pin_memory=torch.cuda.is_available()
        ):
            found.append(model.encode_image(images.to(device.name, non_blocking=True)).to("cpu"))
            if captions:
                found.append(model.encode_text(tokens.to(device.name, non_blocking=True)).to("cpu"))
    if sum(map(len, found)) != options.images * (1 + captions):
        raise RuntimeError(f"the loop embedded {sum(map(len, found))} items")
    return found


def ours(loaded, shards: Path, items: str, options: Namespace, device) -> None:
    """tools.embed on a fresh folder."""
    import contextlib
    import io

    from probemb.runs.preemption import Preemption
    from probemb.search.embeddings import Embeddings
    from tools.embed.command import embed
    from tools.embed.shards import local_shards, partition_names, pending

    given = Namespace(batch_size=options.batch, text_batch_size=256, workers=options.workers, max_bad=0.0,
                      skip_damaged=False, cache_gib=1.0)  # fmt: skip
    kinds = ("image", "text") if items == "both" else (items,)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        out = Embeddings(Path(folder), "x", "x", loaded.model.embed_dim, {})
        tars = local_shards(str(shards))
        tasks = pending(out, list(zip(tars, partition_names(tars))), kinds)
        embed(loaded, out, tasks, given, device, Preemption())
        done = sum(part.count for kind in kinds for part in out.partitions(kind))
    if done != options.images * len(kinds):
        raise RuntimeError(f"tools.embed embedded {done} items")


if __name__ == "__main__":
    run_command(main)
