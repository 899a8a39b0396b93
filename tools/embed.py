"""Embed the images and captions of shards.

    python -m tools.embed --model runs/x --data data/cc3m data/cc12m --out embeddings/x
    torchrun --nproc-per-node 8 -m tools.embed --model runs/x --data data/cc3m --out embeddings/x     # eight GPUs
    python -m tools.embed --part 3/16 …                                       # one of sixteen jobs; see docs/search.md

Each shard becomes one partition, written when the shard is done: a repeated command resumes where the last one
stopped. Several processes share the shards. Remote shards (http, s3, pipe:, …) are fetched as in pretraining.
Unreadable samples are left out and counted; a shard with too many gets no partition, which the command reports.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor

from probemb import models
from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Count, Workers
from probemb.data.failures import BadSample, BadShard
from probemb.data.image_loader import find_tars
from probemb.data.images import decode_image
from probemb.data.pixels import stack
from probemb.data.remote import Remote, fetch, in_background, is_remote
from probemb.data.shards.index import Shard, read_index, read_index_file
from probemb.data.shards.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    SampleSpan,
    group_members,
    parse_sample,
    read_sample,
    walk_tar,
)
from probemb.data.workers import make_loader, read
from probemb.errors import UserError
from probemb.evaluation.embedding import encode_texts
from probemb.machine import Device, choose_device, loader_workers
from probemb.progress import progress
from probemb.reports.text import web_link
from probemb.runs.preemption import Preemption
from probemb.search.embeddings import KINDS, Embeddings, create_embeddings, item_schema

PROG = "python -m tools.embed"
AHEAD = 2  # remote shards that are fetched while one is read
MAX_NAME = 60  # characters of a partition's name, before its hash
MAX_CAPTIONS = 1_000  # of a sample: a file of 1 MiB could have 500,000, which would be embedded at once
SHOWN = 5  # shards that an error names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 85 if a signal stopped it and a repeated command resumes."""
    options = parse(argv)
    kinds = KINDS if options.items == "both" else (options.items,)
    first, step = share(options.part)
    corpora = {str(Remote(d)) if is_remote(d) else os.path.abspath(d): find_shards(d) for d in options.data}
    names = {shard: partition_name(shard) for shards in corpora.values() for shard in shards}
    device = choose_device(local_device(options.device), options.precision)
    if device.name.startswith("cuda"):
        torch.cuda.set_device(device.name)  # else every rank also takes memory of the first GPU
    loaded = models.load_model(options.model, device=device.name)
    models.check_single_embeddings(loaded.model, options.model)
    weights, dim = models.weights_sha256(loaded.model), loaded.model.embed_dim
    name = models.lasting_name(options.model)
    out = create_embeddings(options.out, name, weights, dim, options.mean_dtype, options.resize)
    assigned = list(names.items())[first::step]
    loaded = loaded._replace(transforms=models.create_transforms(loaded.model, resize=out.resize))
    tasks = pending(out, assigned, kinds)
    for data, shards in corpora.items():
        out.add_corpus(data, [names[shard] for shard in shards])
    if len(tasks) < len(assigned):
        print(f"{len(assigned) - len(tasks):,} of {len(assigned):,} shards are embedded already", flush=True)
    with Preemption() as preemption:
        damaged = embed(loaded, out, tasks, options, device, preemption.asked)
        if preemption.asked():
            said = f"stopped by {preemption.description}; the same command resumes from here"
            print(said, file=sys.stderr, flush=True)
            return preemption.exit_code
    report_damaged(damaged, options.skip_damaged)
    for kind in kinds:
        count = out.count(kind)
        print(f"{out.folder} still lacks {kind}s" if count is None else f"{count:,} {kind}s in {out.folder}")
    return 0


def parse(argv: Sequence[str] | None) -> Namespace:
    """Options, checked as far as possible without reading anything."""
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="run folder, model folder, .safetensors file or hub name")
    data = "folders, patterns or addresses of webdataset shards"
    add("--data", required=True, nargs="+", action="extend", help=data)
    add("--out", required=True, type=Path, help="folder for the embeddings")
    add("--items", choices=("both", *KINDS), default="both", help="(default: %(default)s)")
    kept = "type of the stored means; by default the folder's own, float16 for a new one"
    add("--mean-dtype", choices=("float16", "float32"), help=kept)
    resize = "backend for resizing: pil, as open_clip, or tensor (torch: faster, and within a rounding of it); by "
    add("--resize", choices=("tensor", "pil"), help=f"{resize}default the folder's own, pil for a new one")
    add("--part", metavar="I/N", default="1/1", help="every N-th shard from the I-th on (%(default)s)")
    add("--batch-size", type=Count, default=64, help="images in a batch (%(default)s)")
    add("--text-batch-size", type=Count, default=256, help="captions in a batch (%(default)s)")
    add("--workers", type=Workers, help="reading and decoding processes; by default as the machine allows")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--precision", default="auto", help="auto, fp32, bf16, fp16")
    bad = "largest share of a shard's samples that may fail (%(default)s)"
    add("--max-bad", type=ClosedUnitInterval, default=0.05, help=bad)
    add("--skip-damaged", action="store_true", help="embed the samples of damaged shards that can be read")
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
    return f"cuda:{rank}" if torch.cuda.is_available() or device == "cuda" else "cpu"


# ------------------------------------------------------------------------------------------------ shards


def find_shards(data: str) -> list[Shard]:
    """The shards of a corpus. Remote ones are listed in an index.json, as in pretraining. Raises UserError.

    Local tars need no index; without one their samples and bytes are unknown (0).
    """
    if is_remote(data):
        return read_index(data)
    paths = [Path(os.path.abspath(tar)) for tar in find_tars(data) if tar.suffix == ".tar"]  # a link keeps its own name
    if not paths:
        there = "holds no webdataset shards" if Path(data).exists() else "does not exist"
        raise UserError(f"The data path {data} {there}.", "Name a folder of .tar files, a pattern, or one tar.")
    listed = {}
    for folder in {path.parent for path in paths}:
        with suppress(UserError):  # no index, or another program's
            listed |= {shard.path: shard for shard in read_index_file(folder)}
    return [listed.get(path) or Shard(path.name, path, 0, 0) for path in paths]


def partition_name(shard: Shard) -> str:
    """FOLDER-SHARD-HASH, the hash of its path or address; without characters that have a meaning in paths."""
    place = plain(str(shard.path))
    folder = re.findall(r"[\w.-]+", place[: place.rfind(shard.name)])[-1:]
    name = "-".join([*folder, re.sub(r"[^\w.-]", "_", Path(shard.name).stem)])
    return f"{name[:MAX_NAME]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def version(shard: Shard) -> str:
    """The version of a shard: its SHA-256 in the index, else its size and, of a local file, its time of change."""
    if shard.sha256 or isinstance(shard.path, Remote):
        return shard.sha256 or f"{shard.bytes} bytes"
    try:
        status = shard.path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} bytes of {status.st_mtime_ns}"


class ShardTask(NamedTuple):
    """A shard to embed, the name of its partitions, those of KINDS that are missing, and the shard's `version`."""

    shard: Shard
    name: str
    kinds: Sequence[str]
    version: str


def pending(out: Embeddings, shards: Sequence[tuple[Shard, str]], kinds: Sequence[str]) -> list[ShardTask]:
    """The shards that are not embedded yet. Raises UserError: one has changed since it was."""
    tasks, changed = [], []
    for shard, name in shards:
        now, missing = version(shard), []
        for kind in kinds:
            part = out.partition(kind, name)
            if not part or not part.about["version"]:
                missing.append(kind)
            elif part.about["version"] != now:
                changed.append(f"{kind}/{name}.npz")
        if missing:
            tasks.append(ShardTask(shard, name, missing, now))
    if changed:
        raise UserError(
            f"{len(changed):,} partitions of {out.folder} are of shards that have changed since they were embedded: "
            f"{', '.join(changed[:SHOWN])}{', …' if len(changed) > SHOWN else ''}.",
            "Delete these files, and repeat the command, or embed into another folder with --out.",
        )
    return tasks


# ------------------------------------------------------------------------------------------------ reading


class ReadSample(NamedTuple):
    """A sample: its pixels (3, H, W), in a batch whether it has some; tokens (n, L); captions; address; failure."""

    image: Tensor | bool = False
    tokens: np.ndarray | None = None
    captions: Sequence[str] = ()
    url: str | None = None
    failure: str = ""


class Samples(torch.utils.data.Dataset):
    """The samples of a tar."""

    def __init__(self, path: Path, spans: Sequence[SampleSpan], kinds: Sequence[str], transform, tokenizer):
        self.path, self.spans, self.kinds, self.transform, self.tokenizer = path, spans, kinds, transform, tokenizer
        self._file = None

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> ReadSample:
        image, tokens, failure = False, None, ""
        try:
            self._file = self._file or open(self.path, "rb", buffering=0)  # noqa: SIM115 - of this process
            sample = parse_sample(read_sample(self._file.fileno(), self.spans[row]), self.spans[row].key, None)
            if len(sample.captions) > MAX_CAPTIONS:
                raise BadSample(f"it has {len(sample.captions):,} captions, more than {MAX_CAPTIONS:,}")
        except (OSError, BadSample) as error:
            return ReadSample(failure=str(error))
        if "image" in self.kinds:
            try:
                image = self.transform(decode_image(sample.image, exif=True))
            except BadSample as error:
                failure = str(error)  # its captions can be used
        if "text" in self.kinds and sample.captions:
            tokens = self.tokenizer(sample.captions).int().numpy()
        return ReadSample(image, tokens, sample.captions, web_link(sample.meta.get("url")), failure)


def collate(samples: list[ReadSample]) -> tuple[list[ReadSample], Tensor | None]:
    """The samples of a batch, and the images of those that have one, (B, 3, H, W)."""
    images = [sample.image for sample in samples if sample.image is not False]
    return [one._replace(image=one.image is not False) for one in samples], stack(images) if images else None


def list_samples(path: Path) -> list[SampleSpan]:
    """Samples of a tar that have an image. Raises BadShard."""
    found = []
    for key, parts in group_members(walk_tar(path)):
        image = next((ext for ext in IMAGE_EXTENSIONS if ext in parts), None)
        if image is not None:
            found.append(SampleSpan(key, {ext: parts[ext] for ext in (image, *TEXT_EXTENSIONS) if ext in parts}))
    return found


def start_fetch(shard: Shard, folder: str) -> Future[Path]:
    """Begin to fetch a remote shard."""

    def work() -> Path:
        handle, name = tempfile.mkstemp(".tar", dir=folder)
        with open(handle, "wb") as file:
            fetch(shard.path, file, shard.bytes)
        return Path(name)

    return in_background(work)


# ------------------------------------------------------------------------------------------------ embedding


def embed(
    loaded, out: Embeddings, tasks: Sequence[ShardTask], options: Namespace, device: Device, stopped: Callable[[], bool]
) -> list[str]:
    """Embed shard after shard, until `stopped`; returns the paths of damaged ones, with the reasons."""
    fetches: dict[int, Future[Path]] = {}
    damaged = []
    with (
        tempfile.TemporaryDirectory(prefix="probemb-shards-", ignore_cleanup_errors=True) as folder,
        progress("samples", sum(task.shard.samples for task in tasks)) as advance,
        torch.inference_mode(),
    ):
        for number, task in enumerate(tasks):
            for ahead, one in enumerate(tasks[number : number + 1 + AHEAD], number):
                if isinstance(one.shard.path, Remote) and ahead not in fetches:
                    fetches[ahead] = start_fetch(one.shard, folder)
            while number in fetches and not fetches[number].done() and not stopped():
                time.sleep(0.05)
            if stopped():
                break
            spans, damage = [], ""
            path = task.shard.path
            try:
                path = fetches[number].result() if number in fetches else path
                spans = list_samples(path)
                if len(spans) < task.shard.samples:
                    damage = f"holds {len(spans):,} samples, but its index says {task.shard.samples:,}"
            except (BadShard, OSError) as error:
                damage, task = str(error).removeprefix(f"{path}: "), task._replace(version="")  # tried again
            damage = embed_shard(loaded, out, task, path, spans, damage, options, device, stopped, advance)
            if number in fetches and isinstance(path, Path):
                path.unlink(missing_ok=True)
            damaged += [f"{task.shard.path}: {damage}"] if damage else []
    return damaged


def embed_shard(
    loaded, out: Embeddings, task: ShardTask, path: Path, spans: list[SampleSpan], damage: str, options: Namespace,
    device: Device, stopped: Callable[[], bool], advance: Callable[[int], object],
) -> str:  # fmt: skip
    """Write the partitions of a shard, unless it is damaged or `stopped`; returns the damage, "" if there is none."""
    model, tokenizer, transforms = loaded
    workers, ranks = options.workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if workers is None:
        workers = -(-loader_workers(None, len(spans), device.name) // ranks)
    samples = Samples(path, spans, task.kinds, transforms.evaluate, tokenizer)
    pin = device.name.startswith("cuda")
    loader = make_loader(samples, workers, batch_size=options.batch_size, collate_fn=collate, pin_memory=pin)
    found, means, uncertainties = [], [], []
    with closing(read(loader)) as batches:
        for batch, pixels in batches:
            if stopped():
                return ""
            if pixels is not None:
                with device.autocast():
                    images = model.encode_image(pixels.to(device.name, non_blocking=True))
                means.append(images.mean.to(getattr(torch, out.mean_dtype)))
                uncertainties.append(images.uncertainty().float())
            found += batch
            advance(len(batch))
    failures = [(span.key, one.failure) for span, one in zip(spans, found) if one.failure]
    if len(failures) > options.max_bad * len(spans) and not damage:
        damage = f"{len(failures):,} of {len(spans):,} samples cannot be used ({': '.join(failures[0])})"
    causes = Counter(re.sub(r"\d[\d,]*", "N", plain(why)) for _, why in failures)  # so that there are few causes
    causes.update([f"the shard {plain(damage)}"] if damage else [])
    about = {"shard": plain(str(task.shard.path)), "version": task.version, "samples": len(spans)}
    about["failures"] = dict(causes.most_common())
    for kind in task.kinds if options.skip_damaged or not damage else ():
        mean, u = torch.zeros(0, out.dim), torch.zeros(0)
        if kind == "image":
            rows = [(span, one, one.captions, None) for span, one in zip(spans, found) if one.image]
            if rows:
                mean, u = torch.cat(means).cpu(), torch.cat(uncertainties).cpu()
        else:
            rows = [(span, one, [text], i) for span, one in zip(spans, found) for i, text in enumerate(one.captions)]
            if rows:
                tokens, size = [one.tokens for one in found if one.tokens is not None], options.text_batch_size
                texts = encode_texts(
                    model.encode_text,
                    torch.from_numpy(np.concatenate(tokens)).long(),
                    batch_size=size,
                    device=device,
                    cut=model.cut_padding,
                )
                mean, u = texts.mean, texts.uncertainty()
        if not (mean.isfinite().all() and u.isfinite().all()):
            what = f"The model embeds items of {task.shard.path} as NaN or infinity."
            raise UserError(what, "Use another checkpoint, or --precision fp32.")
        out.write(kind, task.name, mean.numpy(), u.numpy(), item_table(kind, about["shard"], rows), about)
    return damage


def item_table(kind: str, shard: str, rows: Sequence[tuple[SampleSpan, ReadSample, list[str], int | None]]) -> pa.Table:
    """Metadata of a partition; `rows`: captions of each, and the number of a caption within its sample."""
    images = [next(span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts) for span, *_ in rows]
    columns = {
        "key": [plain(span.key) for span, *_ in rows],
        "captions": [[plain(one) for one in captions] for _, _, captions, _ in rows],
        "shard": [shard] * len(rows),
        "offset": [image.offset for image in images],
        "size": [image.size for image in images],
        "url": [one.url for _, one, _, _ in rows],
    }
    if kind == "text":
        columns["number"] = [number for *_, number in rows]
    return pa.table(columns, schema=item_schema(kind))


def plain(text: str) -> str:
    """Text that UTF-8 can encode: names in tars may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def report_damaged(damaged: Sequence[str], skip: bool) -> None:
    """Report the shards that were left out. Raises UserError unless `skip`."""
    shown = "; ".join(damaged[:SHOWN]) + ("; …" if len(damaged) > SHOWN else "")
    if damaged and skip:
        print(f"damaged, embedded as far as they can be read: {shown}", file=sys.stderr)
    elif damaged:
        raise UserError(
            f"{len(damaged):,} shard{'s are' if len(damaged) > 1 else ' is'} not embedded ({shown}); all others are.",
            "Fetch them again and repeat the command, allow more with --max-bad, or use --skip-damaged.",
        )


if __name__ == "__main__":
    run_command(main)
