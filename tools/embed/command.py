"""Embed the images and captions of shards.

    python -m tools.embed --model runs/x --data data/cc3m data/cc12m --out embeddings/x
    torchrun --nproc-per-node 8 -m tools.embed --model runs/x --data data/cc3m --out embeddings/x     # eight GPUs
    python -m tools.embed --part 3/16 …                                       # one of sixteen jobs; see docs/search.md

Each shard becomes one partition, written when the shard is done: a repeated command resumes where the last one
stopped. Several processes share the shards. Remote shards (http, s3, pipe:, …) are fetched as in pretraining.
Unreadable samples are left out and counted; a shard with too many gets no partition, which the command reports.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import Parser
from probemb.errors import UserError
from probemb.runs.starts import refuse_idle_start

if TYPE_CHECKING:
    from probemb.cli.device import Device
    from probemb.data.shards.index import Shard
    from probemb.search.embeddings import Embeddings
    from tools.embed.reading import Batch, ShardTask

PROG = "python -m tools.embed"
GIB = 1 << 30
EXAMPLES = 20  # failures that a marker names; all are counted
SHOWN = 5  # damaged shards that an error names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 85 if a signal stopped it and a repeated command resumes."""
    options = parse(argv)
    kinds = ("image", "text") if options.items == "both" else (options.items,)
    part = share(options.part)

    from probemb.cli.device import choose_device
    from tools.embed.shards import distinct, find_corpora, ignored_exif, partition_names, pending

    corpora = find_corpora(options.data)
    shards = distinct(corpora.values())
    names = partition_names(shards)
    refuse_large(shards, options.cache_gib)
    device = choose_device(local_device(options.device), options.precision)

    import torch

    from probemb.models import check_single_embeddings, create_transforms, lasting_name, load_model, weights_sha256
    from probemb.runs.preemption import Preemption
    from probemb.search.embeddings import KINDS, open_embeddings, plan_embeddings, save_embeddings

    if device.name.startswith("cuda"):
        torch.cuda.set_device(device.name)  # else every rank also takes memory of the first GPU
    loaded = load_model(options.model, device=device.name)
    check_single_embeddings(loaded.model, options.model)
    weights, dim = weights_sha256(loaded.model), loaded.model.embed_dim
    named = {data: partition_names(found) for data, found in corpora.items()}
    out = plan_embeddings(
        options.out, lasting_name(options.model), weights, dim, named, options.mean_dtype, options.resize
    )
    loaded = loaded._replace(transforms=create_transforms(loaded.model, resize=out.resize))
    mine = list(zip(shards, names))[part[0] :: part[1]]
    tasks = pending(out, mine, kinds)
    held = [out.marker("image", task.name) for task in tasks if "image" in task.kinds]
    if old := sum(ignored_exif("image", marker) for marker in held if marker):
        print(f"{old:,} shards were embedded without the EXIF orientation of their images, and are embedded again")
    save_embeddings(out, named)
    for task in tasks:
        for kind in task.kinds:  # of a shard that has changed
            out.forget(kind, task.name)
    if len(tasks) < len(mine):
        print(f"{len(mine) - len(tasks):,} of {len(mine):,} shards are embedded already", flush=True)
    with Preemption() as preemption:
        stopped = embed(loaded, out, tasks, options, device, preemption)
    if stopped:
        refuse_idle_start(
            out.folder / f".starts-{part[0] + 1}-of-{part[1]}",
            len(mine) - len(tasks),
            len(mine) - len(pending(out, mine, kinds)),
            "a shard",
            "Give it more time (--time), or smaller shards, and start it again, which resumes.",
        )
        print(f"stopped by {preemption.description}; the same command resumes from here", file=sys.stderr, flush=True)
        return preemption.exit_code
    out = open_embeddings(out.folder)  # other commands may have added to it
    complete = {kind: count for kind in KINDS if (count := out.count(kind)) is not None}
    refuse_damaged([task for task in tasks if task.damage], options.skip_damaged)
    if complete:
        print(f"{' and '.join(f'{count:,} {kind}s' for kind, count in complete.items())} in {out.folder}")
    for kind in kinds:
        if gone := out.gone(kind):
            print(f"{len(gone):,} shards are no longer in the data, and their {kind}s in no index: {gone[0]}, …")
        if kind not in complete:
            print(f"done; {out.folder} still lacks {kind}s of {lacking(out, kind)}")
    return 0


def lacking(out: Embeddings, kind: str) -> str:
    """The corpora with shards that are not embedded."""
    done = {part.name for part in out.partitions(kind)}
    return ", ".join(plain(data) for data, names in out.corpora.items() if not done.issuperset(names))


def parse(argv: Sequence[str] | None) -> Namespace:
    """Options, checked as far as possible without reading anything."""
    from jsonargparse.typing import ClosedUnitInterval

    from probemb.cli.ranges import Count, Gibibytes, Workers

    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="run folder, model folder, .safetensors file or hub name")
    parser.add_argument(
        "--data", required=True, nargs="+", action="extend", help="folders, patterns or addresses of webdataset shards"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the embeddings")
    parser.add_argument("--items", choices=("both", "image", "text"), default="both", help="(default: %(default)s)")
    kept = "type of the stored means; by default the folder's own, float16 for a new one"
    parser.add_argument("--mean-dtype", choices=("float16", "float32"), help=kept)
    resize = "backend for resizing: pil, as open_clip, or tensor (torch: faster, and within a rounding of it); by "
    resize += "default the folder's own, pil for a new one"
    parser.add_argument("--resize", choices=("tensor", "pil"), help=resize)
    parser.add_argument("--part", metavar="I/N", default="1/1", help="every N-th shard from the I-th on (%(default)s)")
    parser.add_argument("--batch-size", type=Count, default=64, help="images in a batch (%(default)s)")
    parser.add_argument("--text-batch-size", type=Count, default=256, help="captions in a batch (%(default)s)")
    parser.add_argument("--workers", type=Workers, help="reading and decoding processes; by default what suits")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16, fp16")
    bad = "largest share of a shard's samples that may fail (%(default)s)"
    parser.add_argument("--max-bad", type=ClosedUnitInterval, default=0.05, help=bad)
    cache = "limit on the disk space of fetched shards (%(default)s)"
    parser.add_argument("--cache-gib", type=Gibibytes, default=100.0, help=cache)
    parser.add_argument(
        "--skip-damaged", action="store_true", help="embed the samples of damaged shards that can be read"
    )
    return parser.parse_args(argv)


def share(part: str) -> tuple[int, int]:
    """(first, step) of this process's shards: --part, shared among a launcher's ranks. Raises UserError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {part} is not a part.", "Write it as 3/16, the third of sixteen.")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return (int(found[1]) - 1) * world + rank, int(found[2]) * world


def local_device(device: str) -> str:
    """The GPU of this rank, if a launcher started one rank per GPU."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or device not in ("auto", "cuda"):
        return device
    import torch

    return f"cuda:{rank}" if torch.cuda.is_available() or device == "cuda" else "cpu"


def refuse_large(shards: Sequence[Shard], gib: float) -> None:
    """Raises UserError for a remote shard that is larger than --cache-gib."""
    from probemb.data.remote.sources import Remote

    remote = [shard for shard in shards if isinstance(shard.path, Remote)]
    largest = max(remote, key=lambda shard: shard.bytes, default=None)
    if largest and largest.bytes > gib * GIB:
        raise UserError(
            f"{largest.path} has {largest.bytes / GIB:.3g} GiB, more than --cache-gib {gib:g} allows.",
            "Raise --cache-gib to a few times that: the next shards are fetched while one is read.",
        )


def embed(loaded, out: Embeddings, tasks: Sequence[ShardTask], options: Namespace, device: Device, preemption) -> bool:
    """Embed every shard and write its partitions; True if a signal stopped it before the end."""
    import torch

    from probemb.cli.progress import progress
    from tools.embed.reading import default_workers, read_batches
    from tools.embed.shards import count_samples

    if not tasks:
        return False
    model, tokenizer, transforms = loaded
    samples = count_samples(tasks)
    workers = default_workers(options.workers, device.name, samples)
    limit = int(options.cache_gib * GIB)
    batches = read_batches(tasks, transforms.evaluate, tokenizer, options.batch_size, workers, limit)
    means, uncertainties = [], []
    with progress("samples", samples) as advance, torch.inference_mode(), contextlib.closing(batches):
        for batch in batches:
            if preemption.asked():
                return True
            if batch is None:  # waiting for a shard
                continue
            task = tasks[batch.number]
            if batch.pixels is not None:
                pixels = batch.pixels.to(device.name, non_blocking=True)
                with device.autocast():
                    found = model.encode_image(pixels)
                means.append(found.mean.to(getattr(torch, out.mean_dtype)))
                uncertainties.append(found.uncertainty().float())
            note(task, batch)
            advance(len(batch.captions))
            if batch.last:
                judge(task, options)
                if not task.damage or (options.skip_damaged and not task.replaced):
                    write(out, task, means, uncertainties, model, options, device)
                means, uncertainties = [], []
                task.spans, task.captions, task.urls, task.tokens = [], [], {}, []
    return False


def note(task: ShardTask, batch: Batch) -> None:
    """Add a batch to the results of its shard."""
    task.images += batch.rows
    for row, captions in batch.captions.items():
        task.captions[row] = captions
    task.urls |= batch.urls
    task.failures += [(task.spans[row].key, why) for row, why in batch.failures]
    if batch.tokens is not None:
        task.tokens.append(batch.tokens)


def judge(task: ShardTask, options: Namespace) -> None:
    """Mark a shard as damaged if too many of its samples failed, or if its content is not that of its index."""
    from tools.embed.shards import content_hash, was_replaced

    task.replaced = was_replaced(task)
    if task.replaced and not task.damage:
        task.damage = "was changed while it was read"
    if task.shard.sha256 and not task.damage and content_hash(task) != task.shard.sha256:
        task.damage = "has other content than when it was indexed (another SHA-256)"
    if len(task.failures) > options.max_bad * len(task.spans) and not task.damage:
        key, why = task.failures[0]
        task.damage = f"{len(task.failures):,} of {len(task.spans):,} samples cannot be used ({key}: {why})"


def write(out: Embeddings, task: ShardTask, means, uncertainties, model, options: Namespace, device: Device) -> None:
    """Write the partitions of one shard."""
    import torch

    from probemb.evaluation.embedding import encode_texts
    from tools.embed.shards import identity

    marker = {
        "shard": str(task.path),
        **identity(task),
        "samples": len(task.spans),
        "without_image": task.skipped,
        "failures": causes(task),
        "examples": [{"key": plain(key), "reason": plain(why)} for key, why in task.failures[:EXAMPLES]],
    }
    if "image" in task.kinds:
        mean = torch.cat(means).cpu() if means else torch.zeros(0, model.embed_dim)
        u = torch.cat(uncertainties).cpu() if means else torch.zeros(0)
        refuse_nonfinite(mean, u, task)
        rows = [(row, task.captions[row], None) for row in task.images]
        out.write("image", task.name, mean.numpy(), u.numpy(), table("image", task, rows), {**marker, "exif": True})
    if "text" in task.kinds:
        rows = [(row, [one], i) for row, some in enumerate(task.captions) for i, one in enumerate(some or [])]
        mean, u = torch.zeros(0, model.embed_dim), torch.zeros(0)
        if rows:
            found = encode_texts(
                model.encode_text, torch.cat(task.tokens).long(), batch_size=options.text_batch_size,
                device=device, cut=model.cut_padding,
            )  # fmt: skip
            mean, u = found.mean, found.uncertainty()
        refuse_nonfinite(mean, u, task)
        out.write("text", task.name, mean.numpy(), u.numpy(), table("text", task, rows), marker)


def table(kind: str, task: ShardTask, rows: Sequence[tuple[int, list[str], int | None]]):
    """Metadata of a partition; `rows`: (row of the shard, captions, number of the caption)."""
    import pyarrow as pa

    from probemb.data.shards.samples import IMAGE_EXTENSIONS
    from probemb.search.embeddings import item_schema

    spans = [task.spans[row] for row, _, _ in rows]
    images = [next(span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts) for span in spans]
    columns = {
        "key": [plain(span.key) for span in spans],
        "captions": [[plain(one) for one in captions] for _, captions, _ in rows],
        "shard": [plain(str(task.path))] * len(rows),
        "offset": [image.offset for image in images],
        "size": [image.size for image in images],
        "url": [task.urls.get(row) for row, _, _ in rows],
    }
    if kind == "text":
        columns["number"] = [number for _, _, number in rows]
    return pa.table(columns, schema=item_schema(kind))


def causes(task: ShardTask) -> dict[str, int]:
    """Failures by cause; numbers in reasons become N, so that there are few causes."""
    reasons = [why for _, why in task.failures]
    if task.damage:
        reasons.append(f"the shard {task.damage}")
    return dict(Counter(re.sub(r"\d[\d,]*", "N", plain(why)) for why in reasons).most_common())


def plain(text: str) -> str:
    """Text that UTF-8 can encode: names in tars may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def refuse_nonfinite(mean, u, task: ShardTask) -> None:
    """Raises UserError."""
    if not (mean.isfinite().all() and u.isfinite().all()):
        raise UserError(
            f"The model embeds items of {task.path} as NaN or infinity.", "Use another checkpoint, or --precision fp32."
        )


def refuse_damaged(damaged: Sequence[ShardTask], skip: bool) -> None:
    """Report the shards that were left out. Raises UserError unless `skip`."""
    if not damaged:
        return
    shown = "; ".join(f"{task.path}: {task.damage}" for task in damaged[:SHOWN])
    shown += "; …" if len(damaged) > SHOWN else ""
    if skip:
        print(f"damaged and left out: {shown}", file=sys.stderr)
        return
    raise UserError(
        f"{len(damaged):,} shard{'s are' if len(damaged) > 1 else ' is'} not embedded ({shown}); all others are.",
        "Fetch them again and repeat the command, allow more with --max-bad, or leave them out with --skip-damaged.",
    )
