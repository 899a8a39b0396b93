"""COCO and Flickr8k (also Flickr30k) from their published archives: images in some zips, captions in others.

Archives are files, folders or addresses; fetched ones are stored in OUT/download/archives. Nothing is unpacked. Images
stay byte-identical unless --resize is given. Each split becomes a corpus of its own, OUT/train, …
"""

import functools
import hashlib
import io
import json
import os
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from probemb.data.captions.dataset import coco_captions
from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.reading import check_unique, checked, split_name
from probemb.data.remote import FetchPolicy, Remote, fetch, is_remote
from probemb.data.shards.samples import MAX_IMAGE_BYTES, MAX_TEXT_BYTES
from probemb.data.shards.write import encode_captions, tar_writer
from probemb.errors import UserError
from probemb.files import replace_file, replace_text
from probemb.progress import progress
from probemb.runs.lock import RunLock
from tools.download.records import GOT, Paths, State, finish
from tools.pools import process_pool

TITLES = {"coco": "COCO", "flickr8k": "Flickr8k"}
_COCO = "http://images.cocodataset.org"
_PARTS = "zips/train{0}.zip", "zips/val{0}.zip", "annotations/annotations_trainval{0}.zip"
PUBLISHED = {year: [f"{_COCO}/{part.format(year)}" for part in _PARTS] for year in ("2014", "2017")}
MAX_ARCHIVE_BYTES, MAX_CAPTIONS_BYTES = 64 << 30, 2 << 30
ABSENT = "not in the archives"


@dataclass(frozen=True)
class Place:
    """The location of a file: a path, or a member of the zip at that path."""

    path: str
    member: str | None
    size: int

    def read(self, limit: int) -> bytes:
        """Raises BadSample: larger than `limit` or than stated, or damaged."""
        if self.size > limit:
            raise BadSample(f"it has {self.size:,} bytes, more than {limit:,}")
        try:
            with open(self.path, "rb") if self.member is None else _archive(self.path).open(self.member) as file:
                data = file.read(self.size + 1)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
            raise BadSample(f"it cannot be read ({type(error).__name__})") from None
        if len(data) != self.size:
            raise BadSample("it has another size than its archive says")
        return data


@functools.lru_cache(maxsize=8)
def _archive(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def fetch_archives(paths: Paths, state: State, sources: Sequence[str], options) -> None:
    """Fetch COCO or Flickr8k and write shards, indexes and report."""
    corpus = state.corpus
    if options.part or options.retry_failed:
        what = f"--part and --retry-failed are for lists of addresses; {corpus} comes in archives."
        raise UserError(what, "Leave them out.")
    published = PUBLISHED if corpus == "coco" else {}
    sources = [source for word in sources for source in published.get(word, [word])]
    if not sources:
        raise UserError(f"No archive of {TITLES[corpus]} was named.", "Name its zips, or for coco 2014 or 2017.")
    with closing(RunLock(paths.home / "locks" / "whole")):
        named = (members(local(source, paths.home / "archives", options.patience)) for source in sources)
        places = list(chain.from_iterable(named))
        images = {Path(n).name: place for n, place in places if n.lower().endswith((".jpg", ".jpeg", ".png"))}
        texts = {Path(n).name: place for n, place in places if n.endswith((".json", ".txt", ".token"))}
        splits, dropped = (coco if corpus == "coco" else flickr)(texts)
        for name, pictures in splits.items():
            listed = json.dumps([[picture.key, picture.captions] for picture in pictures])
            digest = hashlib.sha256(listed.encode()).hexdigest()
            if state.lists.setdefault(name, {"sha256": digest})["sha256"] != digest:
                what = f"{paths.folder} holds other images or captions of {name}."
                raise UserError(what, "Name another folder with --out.")
        state.write(paths)  # once the archives are accepted
        for name, pictures in splits.items():
            write_split(Paths(paths.folder / name), pictures, images, options)
        asked = sum(map(len, splits.values())) + dropped.total()
        folders = [paths.folder / name for name in splits]
        finish(paths, TITLES[corpus], folders, asked, dropped, options.processes)


# ------------------------------------------------------------------------------------------------- published captions

COCO_FILE = re.compile(r"captions_(train|val)(\d{4})\.json")
TOKEN_FILE = re.compile(r".*(?:\.token(?:\.txt)?|_token\.txt)")
SPLIT_FILE = re.compile(r".*[._](train|dev|val|test)(?:Images)?\.txt")
TOKEN_LINE = re.compile(r"(([A-Za-z0-9_-]{1,100})\.(?:jpe?g|png))#(\d{1,4})\t(.*\S.*)", re.IGNORECASE)


@dataclass
class Picture:
    """One image of an archive: the sample's key, its file's name, its captions, and the content of KEY.json."""

    key: str
    name: str
    captions: list[str]
    meta: dict = field(default_factory=dict)


def coco(texts: dict[str, Place]) -> tuple[dict[str, list[Picture]], Counter]:
    """Images by split, and dropped ones by cause.

    captions_train2014.json    {"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}
    """
    splits, dropped = {}, Counter()
    for base, place in sorted(texts.items()):
        if not (match := COCO_FILE.fullmatch(base)):
            continue
        if match[1] in splits:
            what = f"The archives hold captions of several years for {match[1]}."
            raise UserError(what, "Name those of one year.")
        remedy = "Name annotations_trainval2014.zip as COCO publishes it."
        with checked(base, "one of COCO's caption files", remedy):
            found = coco_captions(json.loads(_text(place)))
        splits[match[1]] = [
            Picture(f"{one:012d}", name, [row["caption"] for row in own], {"image_id": one, "captions": own})
            for one, (name, own) in sorted(found.items())
            if own
        ]
        dropped["no caption"] += len(found) - len(splits[match[1]])
    if not any(splits.values()):
        raise UserError("The archives hold no captions, such as captions_train2014.json.", "Name them, too.")
    return splits, +dropped


def flickr(texts: dict[str, Place]) -> tuple[dict[str, list[Picture]], Counter]:
    """The same of Flickr8k and Flickr30k; without lists of splits all images are "train", and `dev` is called `val`.

    Flickr8k.token.txt, results_20130124.token    NAME.jpg#0 TAB caption
    Flickr_8k.trainImages.txt, ...                one NAME.jpg a line
    """
    tokens = [base for base in texts if TOKEN_FILE.fullmatch(base) and "lemma" not in base]
    if len(tokens) != 1:
        what = f"The archives hold {len(tokens)} token files where there should be one."
        raise UserError(what, "Name Flickr8k_text.zip or Flickr8k.token.txt, beside the images.")
    captions: dict[tuple[str, str], dict[int, str]] = {}
    lines = _lines(texts[tokens[0]])
    good = [found for line in lines if (found := TOKEN_LINE.fullmatch(line))]
    if 2 * len(good) <= len(lines):
        raise UserError(f"{tokens[0]} is not a token file.", "Its lines are `NAME.jpg#0 TAB caption`.")
    for found in good:
        captions.setdefault((found[2], found[1]), {})[int(found[3])] = " ".join(found[4].split())
    pictures = {names[1]: Picture(*names, [own[i] for i in sorted(own)]) for names, own in captions.items()}
    lists = {f[1]: dict.fromkeys(_lines(texts[base])) for base in sorted(texts) if (f := SPLIT_FILE.fullmatch(base))}
    check_unique(chain(*lists.values()), "image", "The lists of splits")
    splits = {split_name(one): [pictures[name] for name in names if name in pictures] for one, names in lists.items()}
    splits = {one: chosen for one, chosen in splits.items() if chosen} if lists else {"train": [*pictures.values()]}
    if not splits:
        raise UserError("The lists of splits name no image that has captions.", "Name lists and captions of one set.")
    unlisted = len(pictures) - sum(map(len, splits.values()))
    return splits, +Counter({"malformed row": len(lines) - len(good), "in no split": unlisted})


def _lines(place: Place) -> list[str]:
    return [line.strip() for line in _text(place).decode("utf-8-sig", "replace").split("\n") if line.strip()]


def _text(place: Place) -> bytes:
    try:
        return place.read(MAX_CAPTIONS_BYTES)
    except BadSample as error:
        raise UserError(f"{place.member or place.path} is unusable: {error}.", "Fetch the archive again.") from None


def members(path: Path) -> list[tuple[str, Place]]:
    """Names and locations of the files in a zip or folder, or of a single file."""
    if path.is_dir() or not (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)):
        files = filter(Path.is_file, sorted(path.rglob("*")) if path.is_dir() else [path])
        return [(file.name, Place(str(file), None, file.stat().st_size)) for file in files]
    try:
        entries = _archive(str(path)).infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise UserError(f"{path} is not a whole zip archive: {error}.", "Fetch it again.") from None
    return [(one.filename, Place(str(path), one.filename, one.file_size)) for one in entries if not one.is_dir()]


def local(source: str, folder: Path, patience: float) -> Path:
    """The archive as a local file or folder; an interrupted transfer resumes. Raises UserError."""
    if not is_remote(source):
        if not Path(source).exists():
            raise UserError(f"The archive {source} does not exist.", "Check the path.")
        return Path(source)
    remote = Remote(source)
    if remote.scheme not in ("http", "https"):
        raise UserError(f"{remote} is not a web address.", "Name a file, a folder or an http(s) address.")
    name = Path(remote.split()[0]).name
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}-{name}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part, version = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "version"))
    print(f"fetching {remote}", file=sys.stderr, flush=True)
    try:
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(0, os.SEEK_END)
            state = {"version": version.read_text(encoding="utf-8") if version.exists() else ""}
            try:
                fetch(remote, file, None, FetchPolicy(timeout=patience), MAX_ARCHIVE_BYTES, state)
            finally:
                replace_text(version, state["version"])
    except (BadShard, OSError) as error:
        remedy = "The same command resumes where this one stopped; or fetch it by other means and name the file."
        raise UserError(f"{error}.", remedy) from None
    version.unlink(missing_ok=True)
    if name.lower().endswith(".zip") and not zipfile.is_zipfile(part):
        part.unlink()
        raise UserError(f"What {remote} sends is not a zip archive.", "Correct the address, or name a file.")
    part.replace(path)
    return path


def write_split(paths: Paths, pictures: list[Picture], images: dict[str, Place], options) -> None:
    """Write the missing shards of one split."""
    paths.make()
    size, tasks = options.shard_size, []
    for number, first in enumerate(range(0, len(pictures), size)):
        stats = paths.stats(number)
        if not stats.exists() or json.loads(stats.read_text())["status_dict"].get(ABSENT):  # may be named now
            chosen = [(picture, images.get(picture.name)) for picture in pictures[first : first + size]]
            tasks.append((paths, number, chosen, options))
    count = len(tasks)
    _archive.cache_clear()  # forked processes would share the position in the file
    with progress(paths.folder.name, count) as advance, process_pool(options.processes, count, "--processes") as pool:
        for _ in pool.map(write_shard, tasks):
            advance(1)


def write_shard(task: tuple) -> None:
    """Write one shard, and its counts. Raises OSError."""
    paths, number, pictures, options = task
    causes: Counter[str] = Counter()

    def write(aside: Path) -> None:
        with open(aside, "wb") as file, tar_writer(file) as tar:
            for picture, place in pictures:
                cause, image = stored(place, options)
                text = encode_captions(picture.captions)
                if image and len(text) > MAX_TEXT_BYTES:
                    cause, image = "malformed row", None
                causes[cause] += 1
                if image:
                    meta = {"json": json.dumps(picture.meta).encode()} if picture.meta else {}
                    tar.write({"__key__": picture.key, "jpg": image, "txt": text, **meta})

    replace_file(paths.tar(number), write)
    if not causes[GOT]:
        paths.tar(number).unlink()
    replace_text(paths.stats(number), json.dumps({"count": len(pictures), "status_dict": causes}))


def stored(place: Place | None, options) -> tuple[str, bytes | None]:
    """The cause of a loss, or GOT, and the JPEG unchanged, or resized as --resize says."""
    if place is None:
        return ABSENT, None
    try:
        data = place.read(MAX_IMAGE_BYTES)
        image = decode_image(data, exif=True)
    except BadSample:
        return "broken image", None
    if min(image.size) < options.min_size:
        return "too small", None
    if options.resize in (None, "no") and data.startswith(b"\xff\xd8\xff"):
        return GOT, data
    from tools.download.fetch import UprightResizer

    data, *_, problem = UprightResizer(options, options.resize or "no")(io.BytesIO(data))
    return (problem, None) if problem else (GOT, data)
