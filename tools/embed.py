"""Embed images and captions: shards, an annotation file, a CSV, or a folder of images.

    python -m tools.embed --model runs/x --data data/cc3m data/cc12m --out embeddings/x
    python -m tools.embed --model ViT-B-16 --pretrained weights.pt --data captions.csv --out embeddings/x
    python -m tools.embed --model runs/x --data photos --items image --out embeddings/photos
    python -m tools.embed --model runs/x --data dataset_coco.json --split train --images coco --out embeddings/x
    torchrun --nproc-per-node 8 -m tools.embed --model runs/x --data data/cc3m --out embeddings/x     # eight GPUs
    python -m tools.embed --part 3/16 …                                       # one of sixteen jobs; see docs/search.md

Each shard, or 5,000 images of an annotation file, becomes one partition, written when it is done: a repeated command
resumes where the last one stopped. Several processes share them. Remote shards (http, s3, pipe:, …) are fetched as in
pretraining. Unreadable samples are left out and counted; a shard with too many gets no partition, which the command
reports.
"""

import hashlib
import json
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
from dataclasses import dataclass, field
from functools import partial
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
from probemb.data.captions.dataset import HELD_OUT, CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.failures import BadSample, BadShard
from probemb.data.image_loader import Place, describe_bad, find_tars, refuse_too_many
from probemb.data.images import decode_image, stack
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
from probemb.evaluation.embedding import encode_images, encode_texts
from probemb.gaussian import Gaussian
from probemb.machine import Device, choose_device, loader_workers
from probemb.progress import progress
from probemb.reports.text import web_link
from probemb.runs.preemption import Preemption
from probemb.search.embeddings import KINDS, Embeddings, create_embeddings, item_schema
from tools.pools import part_of

PROG = "python -m tools.embed"
AHEAD = 2  # remote shards that are fetched while one is read
MAX_NAME = 60  # characters of a partition's name, before its hash
MAX_CAPTIONS = 1_000  # of a sample: a file of 1 MiB could have 500,000, which would be embedded at once
SHOWN = 5  # shards that an error names
PART = 5_000  # images of an annotation file in one partition


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 85 if a signal stopped it and a repeated command resumes."""
    options = parse(argv)
    kinds = KINDS if options.items == "both" else (options.items,)
    first, step = share(options.part)
    data = [(str(Remote(d)) if is_remote(d) else os.path.abspath(d), d) for d in options.data]
    corpora = {name: find_shards(d, options) for name, d in data}
    names = {shard: partition_name(shard) for shards in corpora.values() for shard in shards}
    device = choose_device(local_device(options.device), options.precision)
    if device.name.startswith("cuda"):
        torch.cuda.set_device(device.name)  # else every rank also takes memory of the first GPU
    model = f"{options.model}:{options.pretrained}" if options.pretrained else options.model
    loaded = models.load_model(model, device=device.name)
    models.check_single_embeddings(loaded.model, model)
    for tower in (loaded.model.visual, loaded.model.text) if options.inputs else ():
        models.last_projection(tower)  # refuses those without one
    identity = models.lasting_name(model), models.weights_sha256(loaded.model), loaded.model.embed_dim
    out = create_embeddings(options.out, *identity, options.mean_dtype, options.resize)
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
    model = "run folder, model folder, .safetensors file, hub name, or an architecture of open_clip's with --pretrained"
    add("--model", required=True, help=model)
    add("--pretrained", help="open_clip's weights of the architecture --model: a tag such as openai, or a file")
    data = "folders, patterns or addresses of webdataset shards, any captions (docs/data.md), or folders of images"
    add("--data", required=True, nargs="+", action="extend", help=data)
    add("--split", help="of captions with splits: train, val, test; by default all")
    add("--images", type=Path, help="folder of the images of an annotation file; by default searched beside it")
    add("--out", required=True, type=Path, help="folder for the embeddings")
    add("--items", choices=("both", *KINDS), default="both", help="(default: %(default)s)")
    kept = "type of the stored means; by default the folder's own, float16 for a new one"
    inputs = "keep the inputs of the last projections too, for finetune.adapt --method laplace"
    add("--inputs", action="store_true", help=inputs)
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
    (i, n), world = part_of(part), int(os.environ.get("WORLD_SIZE", "1"))
    return (i - 1) * world + int(os.environ.get("RANK", "0")), n * world


def local_device(device: str) -> str:
    """The GPU of this rank, if a launcher started one rank per GPU."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or device not in ("auto", "cuda"):
        return device
    return f"cuda:{rank}" if torch.cuda.is_available() or device == "cuda" else "cpu"


# ------------------------------------------------------------------------------------------------ shards


@dataclass(frozen=True)
class AnnotatedPart(Shard):
    """Some images of an annotation file, in the place of a shard."""

    captions: CaptionDataset | None = field(default=None, compare=False)


def find_shards(data: str, options: Namespace) -> list[Shard]:
    """The shards of a corpus. Remote ones are listed in an index.json, as in pretraining. Raises UserError.

    Local tars need no index; without one their samples and bytes are unknown (0). Other images, with their captions, if
    they have some, are cut into parts.
    """
    if is_remote(data):
        return read_index(data)
    paths = [Path(os.path.abspath(tar)) for tar in find_tars(data) if tar.suffix == ".tar"]  # a link keeps its own name
    if not paths:
        more = {"exif": True, "need_caption": False, "held_out": HELD_OUT}
        captions = find_captions(data, options.split, options.images, **more)
        bad = captions.images.bad
        refuse_too_many(bad, len(captions) + len(bad), data, options.max_bad, "--max-bad")
        if bad:
            print(describe_bad(bad), flush=True)
        return annotated_parts(captions)
    if options.split or options.images:
        raise UserError(f"{data} has shards, which --split and --images do not select.", "Name those shards as --data.")
    listed = {}
    for folder in {path.parent for path in paths}:
        with suppress(UserError):  # no index, or another program's
            listed |= {shard.path: shard for shard in read_index_file(folder)}
    return [listed.get(path) or Shard(path.name, path, 0, 0) for path in paths]


def annotated_parts(captions: CaptionDataset) -> list[Shard]:
    """All images, PART in each; a part has changed if its captions or the names of its images have."""
    found, source = [], Path(os.path.abspath(captions.source))
    for start in range(0, len(captions.images), PART):
        part = captions.only(range(start, min(start + PART, len(captions))))
        told = json.dumps([part.images.places, part.captions]).encode("utf-8", "surrogateescape")
        name = "-".join(filter(None, [source.stem, captions.split, f"{start // PART:05d}"]))
        digest = hashlib.sha256(told).hexdigest()
        found.append(
            AnnotatedPart(f"{name}.json", source.with_name(f"{source.name}#{name}.json"), len(part), 0, digest, part)
        )
    return found


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
    """A sample: where its image lies; its pixels (3, H, W), in a batch whether it has some; tokens (n, L); captions;
    address; failure.
    """

    place: Place
    image: Tensor | bool = False
    tokens: np.ndarray | None = None
    captions: Sequence[str] = ()
    url: str | None = None
    failure: str = ""


class Samples(torch.utils.data.Dataset):
    """The samples at some places; `read(row)` gives a function that decodes the image, the captions and the address."""

    def __init__(self, places: Sequence[Place], read: Callable, kinds: Sequence[str], transform, tokenizer):
        self.places, self.read, self.kinds, self.transform, self.tokenizer = places, read, kinds, transform, tokenizer

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> ReadSample:
        found = ReadSample(self.places[row])
        try:
            decode, captions, url = self.read(row)
            if len(captions) > MAX_CAPTIONS:
                raise BadSample(f"it has {len(captions):,} captions, more than {MAX_CAPTIONS:,}")
        except (OSError, BadSample) as error:
            return found._replace(failure=str(error))
        found = found._replace(captions=captions, url=url)
        if "image" in self.kinds:
            try:
                found = found._replace(image=self.transform(decode()))
            except BadSample as error:
                found = found._replace(failure=str(error))  # its captions can be used
        if "text" in self.kinds and captions:
            found = found._replace(tokens=self.tokenizer(captions).int().numpy())
        return found


def tar_samples(path: Path, shard: str, *settings) -> Samples:
    """The samples of a tar that have an image; shard: its path or address. Raises BadShard."""
    places, spans = [], []
    for key, parts in group_members(walk_tar(path)):
        image = next((ext for ext in IMAGE_EXTENSIONS if ext in parts), None)
        if image is not None:
            spans.append(SampleSpan(key, {ext: parts[ext] for ext in (image, *TEXT_EXTENSIONS) if ext in parts}))
            places.append(Place(key, shard, parts[image].offset, parts[image].size))
    return Samples(places, partial(_read_tar, path, spans), *settings)


def _read_tar(path: Path, spans: Sequence[SampleSpan], row: int) -> tuple[Callable, Sequence[str], str | None]:
    with open(path, "rb", buffering=0) as file:
        sample = parse_sample(read_sample(file.fileno(), spans[row]), spans[row].key, None)
    return partial(decode_image, sample.image, exif=True), sample.captions, web_link(sample.meta.get("url"))


def annotated_samples(captions: CaptionDataset, *settings) -> Samples:
    """Images with their captions, of an annotation file."""
    places = [at._replace(file=os.path.abspath(at.file)) for at in captions.images.places]
    places = [at if at.size >= 0 else at._replace(size=os.path.getsize(at.file)) for at in places]
    return Samples(places, partial(_read_annotated, captions), *settings)


def _read_annotated(captions: CaptionDataset, row: int) -> tuple[Callable, Sequence[str], None]:
    return partial(captions.images.open, row), captions.captions[row], None


def collate(samples: list[ReadSample]) -> tuple[list[ReadSample], Tensor | None]:
    """The samples of a batch, and the images of those that have one, (B, 3, H, W)."""
    images = [sample.image for sample in samples if sample.image is not False]
    return [one._replace(image=one.image is not False) for one in samples], stack(images) if images else None


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
            path, settings = task.shard.path, (task.kinds, loaded.transforms.evaluate, loaded.tokenizer)
            samples, damage = Samples([], None, *settings), ""
            try:
                if isinstance(task.shard, AnnotatedPart):
                    samples = annotated_samples(task.shard.captions, *settings)
                else:
                    path = fetches[number].result() if number in fetches else path
                    samples = tar_samples(path, plain(str(task.shard.path)), *settings)
                if len(samples) < task.shard.samples:
                    damage = f"holds {len(samples):,} samples, but its index says {task.shard.samples:,}"
            except (BadShard, OSError) as error:
                damage, task = str(error).removeprefix(f"{path}: "), task._replace(version="")  # tried again
            damage = embed_shard(loaded.model, out, task, samples, damage, options, device, stopped, advance)
            if number in fetches and isinstance(path, Path):
                path.unlink(missing_ok=True)
            damaged += [f"{task.shard.path}: {damage}"] if damage else []
    return damaged


def embed_shard(
    model, out: Embeddings, task: ShardTask, samples: Samples, damage: str, options: Namespace, device: Device,
    stopped: Callable[[], bool], advance: Callable[[int], object],
) -> str:  # fmt: skip
    """Write the partitions of a shard, unless it is damaged or `stopped`; returns the damage, "" if there is none."""
    workers, ranks = options.workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if workers is None:
        workers = -(-loader_workers(None, len(samples), device.name) // ranks)
    pin = device.name.startswith("cuda")
    loader = make_loader(samples, workers, batch_size=options.batch_size, collate_fn=collate, pin_memory=pin)
    found, means, uncertainties, more = [], [], [], {kind: [] for kind in KINDS}
    image_of, text_of = (partial(encode, model, kind, more[kind] if options.inputs else None) for kind in KINDS)
    with closing(read(loader)) as batches:
        for batch, pixels in batches:
            if stopped():
                return ""
            if pixels is not None:
                with device.autocast():
                    images = image_of(pixels.to(device.name, non_blocking=True))
                means.append(images.mean.to(getattr(torch, out.mean_dtype)))
                uncertainties.append(images.uncertainty().float())
            found += batch
            advance(len(batch))
    failures = [(one.place.name, one.failure) for one in found if one.failure]
    if len(failures) > options.max_bad * len(samples) and not damage:
        damage = f"{len(failures):,} of {len(samples):,} samples cannot be used ({': '.join(failures[0])})"
    causes = Counter(re.sub(r"\d[\d,]*", "N", plain(why)) for _, why in failures)  # so that there are few causes
    causes.update([f"the shard {plain(damage)}"] if damage else [])
    about = {"shard": plain(str(task.shard.path)), "version": task.version, "samples": len(samples)}
    about["failures"] = dict(causes.most_common())
    for kind in task.kinds if options.skip_damaged or not damage else ():
        mean, u = torch.zeros(0, out.dim), torch.zeros(0)
        if kind == "image":
            rows = [(one, one.captions, None) for one in found if one.image]
            if rows:
                mean, u = torch.cat(means).cpu(), torch.cat(uncertainties).cpu()
        else:
            rows = [(one, [text], i) for one in found for i, text in enumerate(one.captions)]
            if rows:
                tokens = torch.from_numpy(np.concatenate([one.tokens for one in found if one.tokens is not None]))
                tokens, size, cut = tokens.long(), options.text_batch_size, model.cut_padding
                if options.inputs:  # in their order, as what they append to `more`
                    texts = encode_images(text_of, map(cut, tokens.split(size)), device)
                else:
                    texts = encode_texts(text_of, tokens, batch_size=size, device=device, cut=cut)
                mean, u = texts.mean, texts.uncertainty()
        raw_and_inputs = [torch.cat(x).to(getattr(torch, out.mean_dtype)) for x in zip(*more[kind])]
        if not all(x.isfinite().all() for x in (mean, u, *raw_and_inputs)):
            what = f"The model embeds items of {task.shard.path} as NaN or infinity."
            raise UserError(what, "Use another checkpoint, --mean-dtype float32, or --precision fp32.")
        more_arrays = zip(("raw", "inputs"), (x.numpy() for x in raw_and_inputs))
        out.write(kind, task.name, mean.numpy(), u.numpy(), item_table(kind, rows), about, **dict(more_arrays))
    return damage


def encode(model, kind: str, more: list | None, batch: Tensor) -> Gaussian:
    """Embed a batch, and append what method laplace reads to `more`, if it is given."""
    if more is None:
        return model.encode_image(batch) if kind == "image" else model.encode_text(batch)
    tower = model.visual if kind == "image" else model.text
    encoded, inputs = models.last_layer(tower, partial(tower, batch))
    more.append((encoded.codes.float().cpu(), inputs.cpu()))
    return encoded.gaussian


def item_table(kind: str, rows: Sequence[tuple[ReadSample, Sequence[str], int | None]]) -> pa.Table:
    """Metadata of a partition; `rows`: captions of each, and the number of a caption within its sample."""
    columns = {
        "key": [plain(one.place.name) for one, *_ in rows],
        "captions": [[plain(text) for text in captions] for _, captions, _ in rows],
        "shard": [plain(one.place.file) for one, *_ in rows],
        "offset": [one.place.offset for one, *_ in rows],
        "size": [one.place.size for one, *_ in rows],
        "url": [one.url for one, *_ in rows],
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
        what = f"{len(damaged):,} shard{'s are' if len(damaged) > 1 else ' is'} not embedded ({shown}); all others are."
        remedy = "Fetch them again and repeat the command, allow more with --max-bad, or use --skip-damaged."
        raise UserError(what, remedy)


if __name__ == "__main__":
    run_command(main)
