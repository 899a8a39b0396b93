"""Find the shards to embed, name their partitions, and detect which are embedded already."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from probemb.data.failures import BadShard
from probemb.data.image_loader import find_tars
from probemb.data.remote.sources import Remote, is_remote, version_of
from probemb.data.shards.index import Shard, file_sha256, read_index, read_index_file
from probemb.data.shards.samples import SampleSpan
from probemb.errors import UserError
from probemb.search.embeddings import Embeddings
from tools.embed.reading import ShardTask, list_images

MAX_NAME = 200  # bytes of a partition's name
REQUESTS = 16  # to a server at a time


def find_corpora(data: Sequence[str]) -> dict[str, list[Shard]]:
    """The shards of each --data by its name: an absolute path, or an address without possible secrets.

    Remote shards are listed in an index.json, as in pretraining. Raises UserError.
    """
    found: dict[str, list[Shard]] = {}
    for one in data:
        if is_remote(one):
            found.setdefault(str(Remote(one)), []).extend(read_index(one))
            continue
        shards = local_shards(one)
        if not shards:
            there = "holds no webdataset shards" if Path(one).exists() else "does not exist"
            raise UserError(f"The data path {one} {there}.", "Name a folder of .tar files, a pattern, or one tar.")
        found.setdefault(os.path.abspath(one), []).extend(shards)
    return found


def local_shards(data: str) -> list[Shard]:
    """Local tars, which need no index; their samples and bytes are unknown (0), their hash is that of an index."""
    paths = [Path(os.path.abspath(tar)) for tar in find_tars(data) if tar.suffix == ".tar"]  # a link keeps its own name
    listed = {path: shard for folder in {path.parent for path in paths} for path, shard in listed_in(folder).items()}
    return [Shard(path.name, path, 0, 0, listed[path].sha256 if path in listed else None) for path in paths]


def listed_in(folder: Path) -> dict[Path, Shard]:
    """The shards of a local folder's index; empty without one, or with one of something else."""
    try:
        return {shard.path: shard for shard in read_index_file(folder)}
    except UserError:
        return {}


def distinct(corpora: Iterable[Sequence[Shard]]) -> list[Shard]:
    """The shards of several corpora, each once, in order."""
    return list({shard.path: shard for shards in corpora for shard in shards}.values())


def partition_names(shards: Sequence[Shard]) -> list[str]:
    """FOLDER-SHARD for each tar. Raises UserError: two are the same, or one is too long."""
    names = [partition_name(shard) for shard in shards]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        both = [str(shard.path) for shard, name in zip(shards, names) if name == twice]
        raise UserError(
            f"{both[0]} and {both[1]} have the same folder name and name.",
            "Embed them into two folders; tools.build_index takes several.",
        )
    if too_long := next((s for s, name in zip(shards, names) if len(name.encode()) > MAX_NAME), None):
        raise UserError(f"The name of {too_long.path} is too long.", "Rename the shard or its folder.")
    return names


def partition_name(shard: Shard) -> str:
    """FOLDER-SHARD; in names from addresses, characters with a meaning in paths are replaced."""
    if isinstance(shard.path, Path):
        return f"{shard.path.parent.name}-{shard.path.stem}".encode("utf-8", "backslashreplace").decode()
    text = str(shard.path)
    before = text[: text.rfind(shard.name)] if shard.path.scheme == "pipe" else f"{text.rpartition('/')[0]}/"
    folders = re.findall(r"[^\s/'\"=|<>;]+(?=/)", before)
    folder = folders[-1] if folders and before.endswith("/") else shard.path.scheme
    return re.sub(r"[^\w.-]", "_", f"{folder}-{Path(shard.name).stem}")


def pending(out: Embeddings, shards: Sequence[tuple[Shard, str]], kinds: Sequence[str]) -> list[ShardTask]:
    """The shards that are not embedded, or not as they are now.

    Raises UserError: a partition is another shard's, or the version of a remote shard cannot be looked up.
    """
    markers = {(kind, name): out.marker(kind, name) for _, name in shards for kind in kinds}
    versions = look_up(
        [shard for shard, name in shards if any(needs_version(shard, markers[kind, name]) for kind in kinds)]
    )
    tasks = []
    for shard, name in shards:
        left = []
        for kind in kinds:
            marker = markers[kind, name]
            if marker and marker.get("shard") != str(shard.path):
                raise UserError(
                    f"{out.folder} has embeddings of {marker.get('shard')} under the name {name}.",
                    f"Embed {shard.path} into another folder; tools.build_index takes several.",
                )
            if not marker or not is_unchanged(shard, marker, versions) or ignored_exif(kind, marker):
                left.append(kind)
        if left:
            tasks.append(ShardTask(shard, name, tuple(left)))
    return tasks


def ignored_exif(kind: str, marker: dict) -> bool:
    """True if a partition is of an older version, which embedded images as stored, some of them on their side."""
    return kind == "image" and not marker.get("exif")


def was_fetched(shard: Shard, marker: dict | None) -> bool:
    """True if a marker is of a remote shard that could be read and has the same size in its index."""
    remote = isinstance(shard.path, Remote) and marker is not None
    return remote and marker.get("bytes") == shard.bytes and bool(marker.get("members"))


def needs_version(shard: Shard, marker: dict | None) -> bool:
    """True if only the server can tell that a fetched shard has changed: one of the two hashes is missing."""
    return was_fetched(shard, marker) and not (shard.sha256 and marker.get("sha256"))


def look_up(shards: Sequence[Shard]) -> dict[Remote, str | None]:
    """Current versions of remote shards; None if the server states none. Raises UserError."""
    paths = [shard.path for shard in shards]
    if not paths:
        return {}
    try:
        with ThreadPool(REQUESTS) as pool:  # its threads do not delay Ctrl-C
            return dict(zip(paths, pool.imap(version_of, paths)))
    except BadShard as error:
        raise UserError(
            f"Whether a shard has changed since it was embedded cannot be found out: {error}.",
            "Repeat the command when it can be reached, or take it out of the index.json there.",
        ) from None


def is_unchanged(shard: Shard, marker: dict, versions: Mapping[Remote, str | None]) -> bool:
    """True if a shard is the one that was embedded.

    A local file: its times are the same or, as after copying, its SHA-256. A remote one: the same SHA-256 in its index;
    without one, the same size there and the same version (ETag or date), if its server states one.
    """
    if isinstance(shard.path, Remote):
        if not was_fetched(shard, marker):
            return False
        if needs_version(shard, marker):
            return marker.get("version") == versions[shard.path]
        return marker["sha256"] == shard.sha256
    try:
        status = shard.path.stat()
        if marker.get("bytes") != status.st_size:
            return False
        # Markers of older versions have neither the time of change nor a hash.
        if marker.get("modified") == status.st_mtime_ns and marker.get("changed") in (None, status.st_ctime_ns):
            return True
        return bool(marker.get("sha256")) and marker["sha256"] == file_sha256(shard.path)
    except OSError:  # a broken link
        return False


def identity(task: ShardTask) -> dict:
    """The part of a marker by which `is_unchanged` recognises the shard."""
    members, sha256 = members_digest(task.spans), content_hash(task)
    if isinstance(task.path, Remote):  # without members it is fetched again by the next command
        known = {"bytes": task.shard.bytes, "version": task.version, "members": members if task.file else None}
    elif task.times is None:
        known = {"bytes": None, "modified": None, "changed": None, "members": None}
    else:
        known = {**dict(zip(("bytes", "modified", "changed"), task.times)), "members": members}
    return {**known, "sha256": sha256}


def content_hash(task: ShardTask) -> str | None:
    """SHA-256 of the file that was embedded; None if it could not be read."""
    try:
        return task.sha256.result() if task.sha256 else None
    except OSError:
        return None


def was_replaced(task: ShardTask) -> bool:
    """True if the file is no longer the one whose members were listed; waits for its SHA-256."""
    content_hash(task)
    if task.times is None:
        return False
    try:
        status = task.file.stat()
    except OSError:
        return True
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) != task.times


def members_digest(spans: Sequence[SampleSpan]) -> str:
    """SHA-256 of the names, offsets and sizes of a shard's samples."""
    return hashlib.sha256(repr([(span.key, sorted(span.parts.items())) for span in spans]).encode()).hexdigest()


def count_samples(tasks: Sequence[ShardTask]) -> int:
    """Samples of the shards by their indexes or else their headers; 0 for an unreadable one."""
    known: dict[Path, dict[Path, Shard]] = {}
    total = 0
    for task in tasks:
        if isinstance(task.path, Remote):
            total += task.shard.samples
            continue
        folder = task.path.parent
        if folder not in known:
            known[folder] = listed_in(folder)
        if task.path in known[folder]:
            total += known[folder][task.path].samples
            continue
        with contextlib.suppress(BadShard, OSError):
            total += len(list_images(task.path)[0])
    return total
