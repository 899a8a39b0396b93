"""Embed the images and captions of shards.

    python -m tools.embed --model runs/x --data data/cc3m data/cc12m --out embeddings/x
    torchrun --nproc-per-node 8 -m tools.embed --model runs/x --data data/cc3m --out embeddings/x     # eight GPUs
    python -m tools.embed --part 3/16 …                                       # one of sixteen jobs; see docs/search.md

One partition a shard, written when the shard is done: a command that is repeated goes on where the last one stopped.
Several processes share the shards among themselves by their order. Shards that lie elsewhere (http, s3, pipe:, …) are
fetched as pretraining fetches them, one by one. What cannot be read is left out and counted; a shard of which too much
fails gets no partition, and the command says so at its end.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemb.cli.command import Parser
from probemb.errors import UserError

if TYPE_CHECKING:
    from probemb.cli.device import Device
    from probemb.data.shards.index import Shard
    from probemb.search.embeddings import Embeddings
    from tools.embed.reading import Batch, Work

PROG = "python -m tools.embed"
GIB = 1 << 30
EXAMPLES = 20  # failures that a marker names; all are counted
SHOWN = 5  # damaged shards that an error names


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0, or 85 when a signal asked it to stop and a repeated command will go on."""
    options = parse(argv)
    kinds = ("image", "text") if options.items == "both" else (options.items,)
    part = share(options.part)

    from probemb.cli.device import choose_device
    from tools.embed.shards import distinct, find_corpora, partition_names, pending

    corpora = find_corpora(options.data)
    shards = distinct(corpora.values())
    names = partition_names(shards)
    refuse_large(shards, options.cache_gib)
    device = choose_device(local_device(options.device), options.precision)

    import torch

    from probemb.models import lasting_name, load_model, weights_sha256
    from probemb.runs.preemption import REQUEUE, Preemption
    from probemb.search.embeddings import KINDS, open_embeddings, plan_embeddings, save_embeddings

    if device.name.startswith("cuda"):
        torch.cuda.set_device(device.name)  # else every rank holds memory of the first GPU too
    loaded = load_model(options.model, device=device.name)
    weights, dim = weights_sha256(loaded.model), loaded.model.embed_dim
    named = {data: partition_names(found) for data, found in corpora.items()}
    out = plan_embeddings(options.out, lasting_name(options.model), weights, dim, named)
    mine = list(zip(shards, names))[part[0] :: part[1]]
    works = pending(out, mine, kinds)
    save_embeddings(out, named)
    for work in works:
        for kind in work.kinds:  # of a shard that has changed
            out.forget(kind, work.name)
    if len(works) < len(mine):
        print(f"{len(mine) - len(works):,} of {len(mine):,} shards are embedded already", flush=True)
    with Preemption() as preemption:
        stopped = embed(loaded, out, works, options, device, preemption)
    if stopped:
        print(f"stopped by {preemption.name}; the same command goes on from here", file=sys.stderr, flush=True)
        return REQUEUE
    out = open_embeddings(out.folder)  # other commands may have added to it
    complete = {kind: count for kind in KINDS if (count := out.count(kind)) is not None}
    refuse_damaged([work for work in works if work.damage], options.skip_damaged)
    if complete:
        print(f"{' and '.join(f'{count:,} {kind}s' for kind, count in complete.items())} in {out.folder}")
    for kind in kinds:
        if kind not in complete:
            print(f"what was asked for is done; {out.folder} still lacks {kind}s of {lacking(out, kind)}")
    return 0


def lacking(out: Embeddings, kind: str) -> str:
    """The corpora of which not every shard is embedded."""
    done = {part.name for part in out.partitions(kind)}
    return ", ".join(plain(data) for data, names in out.corpora.items() if not done.issuperset(names))


def parse(argv: Sequence[str] | None) -> Namespace:
    """The options, checked as far as they can be without reading anything."""
    from jsonargparse.typing import ClosedUnitInterval

    from probemb.cli.ranges import Count, Gibibytes, Workers

    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="run folder, model folder, .safetensors file or hub name")
    parser.add_argument("--data", required=True, nargs="+", help="folders, patterns or addresses of webdataset shards")
    parser.add_argument("--out", required=True, help="folder for the embeddings")
    parser.add_argument("--items", choices=("both", "image", "text"), default="both", help="(default: %(default)s)")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="every N-th shard from the I-th on (%(default)s)")
    parser.add_argument("--batch-size", type=Count, default=64, help="images in a batch (%(default)s)")
    parser.add_argument("--text-batch-size", type=Count, default=256, help="captions in a batch (%(default)s)")
    parser.add_argument(
        "--workers", type=Workers, help="processes that read and decode; by default as the machine allows"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16, fp16")
    parser.add_argument(
        "--max-bad",
        type=ClosedUnitInterval,
        default=0.05,
        help="largest share of a shard's samples that may fail (%(default)s)",
    )
    parser.add_argument(
        "--cache-gib", type=Gibibytes, default=100.0, help="most that fetched shards take on the disk (%(default)s)"
    )
    parser.add_argument("--skip-damaged", action="store_true", help="leave out what is damaged, for good")
    return parser.parse_args(argv)


def share(part: str) -> tuple[int, int]:
    """(first, step) of the shards of this process: --part, shared among a launcher's ranks. Raises UserError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {part} is not a part.", "Write it as 3/16, the third of sixteen.")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return (int(found[1]) - 1) * world + rank, int(found[2]) * world


def local_device(device: str) -> str:
    """The GPU of this rank, where a launcher started one for each."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or device not in ("auto", "cuda"):
        return device
    import torch

    return f"cuda:{rank}" if torch.cuda.is_available() or device == "cuda" else "cpu"


def refuse_large(shards: Sequence[Shard], gib: float) -> None:
    """Raises UserError for a remote shard that is larger than all fetched ones together may be."""
    from probemb.data.remote.sources import Remote

    remote = [shard for shard in shards if isinstance(shard.path, Remote)]
    largest = max(remote, key=lambda shard: shard.bytes, default=None)
    if largest and largest.bytes > gib * GIB:
        raise UserError(
            f"{largest.path} has {largest.bytes / GIB:.3g} GiB, more than --cache-gib {gib:g} allows.",
            "Raise --cache-gib to a few times that, as the next shards are fetched while one is read.",
        )


def embed(loaded, out: Embeddings, works: Sequence[Work], options: Namespace, device: Device, preemption) -> bool:
    """Embed every shard of `works` and write its partitions; True if a signal stopped it before the end."""
    import torch

    from probemb.cli.progress import progress
    from tools.embed.reading import default_workers, read_batches
    from tools.embed.shards import count_samples

    if not works:
        return False
    model, tokenizer, transforms = loaded
    samples = count_samples(works)
    workers = default_workers(options.workers, device.name, samples)
    limit = int(options.cache_gib * GIB)
    batches = read_batches(works, transforms.evaluate, tokenizer, options.batch_size, workers, limit)
    means, uncertainties = [], []
    with progress("samples", samples) as advance, torch.inference_mode(), contextlib.closing(batches):
        for batch in batches:
            if preemption.asked():
                return True
            if batch is None:  # a shard is waited for
                continue
            work = works[batch.number]
            if batch.pixels is not None:
                pixels = batch.pixels.to(device.name, non_blocking=True)
                with device.autocast():
                    found = model.encode_image(pixels)
                means.append(found.mean.half())
                uncertainties.append(found.uncertainty().float())
            note(work, batch)
            advance(len(batch.captions))
            if batch.last:
                judge(work, options)
                if not work.damage or options.skip_damaged:
                    write(out, work, means, uncertainties, model, options, device)
                means, uncertainties = [], []
                work.spans, work.captions, work.tokens = [], [], []
    return False


def note(work: Work, batch: Batch) -> None:
    """What a batch says about its shard."""
    work.images += batch.rows
    for row, captions in batch.captions.items():
        work.captions[row] = captions
    work.failures += [(work.spans[row].key, why) for row, why in batch.failures]
    if batch.tokens is not None:
        work.tokens.append(batch.tokens)


def judge(work: Work, options: Namespace) -> None:
    """Call a shard damaged if too many of its samples failed."""
    if len(work.failures) > options.max_bad * len(work.spans) and not work.damage:
        key, why = work.failures[0]
        work.damage = f"{len(work.failures):,} of {len(work.spans):,} samples cannot be used ({key}: {why})"


def write(out: Embeddings, work: Work, means, uncertainties, model, options: Namespace, device: Device) -> None:
    """The partitions of one shard."""
    import torch

    from probemb.evaluation.embedding import encode_texts
    from tools.embed.shards import identity

    marker = {
        "shard": str(work.path),
        **identity(work),
        "samples": len(work.spans),
        "without_image": work.skipped,
        "failures": causes(work),
        "examples": [{"key": plain(key), "reason": plain(why)} for key, why in work.failures[:EXAMPLES]],
    }
    if "image" in work.kinds:
        mean = torch.cat(means).cpu() if means else torch.zeros(0, model.embed_dim)
        u = torch.cat(uncertainties).cpu() if means else torch.zeros(0)
        refuse_nonfinite(mean, u, work)
        rows = [(row, work.captions[row], None) for row in work.images]
        out.write("image", work.name, mean.numpy(), u.numpy(), table("image", work, rows), marker)
    if "text" in work.kinds:
        rows = [(row, [one], i) for row, some in enumerate(work.captions) for i, one in enumerate(some or [])]
        mean, u = torch.zeros(0, model.embed_dim), torch.zeros(0)
        if rows:
            found = encode_texts(
                model.encode_text, torch.cat(work.tokens).long(), batch_size=options.text_batch_size,
                device=device, cut=model.cut_padding,
            )  # fmt: skip
            mean, u = found.mean, found.uncertainty()
        refuse_nonfinite(mean, u, work)
        out.write("text", work.name, mean.numpy(), u.numpy(), table("text", work, rows), marker)


def table(kind: str, work: Work, rows: Sequence[tuple[int, list[str], int | None]]):
    """What stands behind the rows of a partition: (row of the shard, captions, number of the caption)."""
    import pyarrow as pa

    from probemb.data.shards.samples import IMAGE_EXTENSIONS
    from probemb.search.embeddings import item_schema

    spans = [work.spans[row] for row, _, _ in rows]
    images = [next(span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts) for span in spans]
    columns = {
        "key": [plain(span.key) for span in spans],
        "captions": [[plain(one) for one in captions] for _, captions, _ in rows],
        "shard": [plain(str(work.path))] * len(rows),
        "offset": [image.offset for image in images],
        "size": [image.size for image in images],
    }
    if kind == "text":
        columns["number"] = [number for _, _, number in rows]
    return pa.table(columns, schema=item_schema(kind))


def causes(work: Work) -> dict[str, int]:
    """Failures by cause; numbers in a reason are left out, so that there are few."""
    reasons = [re.sub(r"\d[\d,]*", "N", plain(why)) for _, why in work.failures]
    if work.damage:
        reasons.append(f"the shard {re.sub(r'[0-9][0-9,]*', 'N', plain(work.damage))}")
    return dict(Counter(reasons).most_common())


def plain(text: str) -> str:
    """Text that UTF-8 can hold: names in tars may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def refuse_nonfinite(mean, u, work: Work) -> None:
    """Raises UserError."""
    if not (mean.isfinite().all() and u.isfinite().all()):
        raise UserError(
            f"The model embeds items of {work.path} as NaN or infinity.", "Use another checkpoint, or --precision fp32."
        )


def refuse_damaged(damaged: Sequence[Work], skip: bool) -> None:
    """Say which shards were left out. Raises UserError, unless they count as empty."""
    if not damaged:
        return
    shown = "; ".join(f"{work.path}: {work.damage}" for work in damaged[:SHOWN])
    shown += "; …" if len(damaged) > SHOWN else ""
    if skip:
        print(f"damaged and left out: {shown}", file=sys.stderr)
        return
    raise UserError(
        f"{len(damaged):,} shard{'s are' if len(damaged) > 1 else ' is'} not embedded ({shown}); all others are.",
        "Fetch them again and repeat the command, allow more with --max-bad, or leave them out with --skip-damaged.",
    )
