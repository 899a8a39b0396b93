"""The folder of a downloaded corpus, and what became of its rows.

    OUT/00012.tar                             complete or absent
    OUT/index.json
    OUT/download/state.json                   corpus, settings, lists, number of planned shards
    OUT/download/todo/00012.arrow             the rows of a shard that is not finished: url, caption, and more
    OUT/download/records/00012.parquet        a row of img2dataset's for each address: key, status, sizes, hash
    OUT/download/records/00012_stats.json     img2dataset's counts; written last
    OUT/download/report.json                  asked = got + lost + not asked yet

A shard that is killed leaves its file in `todo`, and is fetched again.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from probemb.data.shards.samples import list_samples
from probemb.data.shards.write import copy_samples
from probemb.errors import UserError
from probemb.files import replace_file, replace_text
from tools.shards import index_folder

STATE, HASH = "download", "sha256"
GOT, DUPLICATE = "success", "duplicate image"
NAMES = {"Use of image disallowed by X-Robots-Tag directive": "opted out", "image too small": "too small"}


class Paths:
    """Paths of the files of a corpus."""

    def __init__(self, folder: Path):
        self.folder, self.home = folder, folder / STATE
        self.todo, self.records, self.work = (self.home / name for name in ("todo", "records", "work"))

    def make(self) -> None:
        for path in (self.todo, self.records, self.work, self.home / "locks"):
            path.mkdir(parents=True, exist_ok=True)

    def tar(self, number: int) -> Path:
        return self.folder / f"{number:05d}.tar"

    def rows(self, number: int) -> Path:
        return self.records / f"{number:05d}.parquet"

    def stats(self, number: int) -> Path:
        return self.records / f"{number:05d}_stats.json"

    def pending(self, part: tuple[int, int] = (1, 1)) -> list[tuple[int, str]]:
        """Numbers and rows of the unfinished shards; for part (i, n), counted from 1, every n-th."""
        numbers = ((int(path.stem), str(path)) for path in sorted(self.todo.glob("*.arrow")))
        return [(number, path) for number, path in numbers if number % part[1] == part[0] - 1]


@dataclass
class State:
    """Settings that a folder was started with; `lists`: bytes, rows and dropped rows by cause, by the file's name."""

    corpus: str
    settings: dict
    shards: int = 0
    lists: dict[str, dict] = field(default_factory=dict)

    def write(self, paths: Paths) -> None:
        replace_text(paths.home / "state.json", json.dumps(asdict(self), indent=1) + "\n")


def read_state(paths: Paths, corpus: str) -> State | None:
    """The state of a folder, None for a new one. Raises UserError: the folder holds something else."""
    folder, path = paths.folder, paths.home / "state.json"
    if not path.is_file():
        if folder.exists() and (
            not folder.is_dir() or any(path.name[0] != "." and path.name != STATE for path in folder.iterdir())
        ):
            what = f"{folder} holds files that this command did not write."
            raise UserError(what, "Name a new or empty folder with --out.")
        return None
    try:
        state = State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} cannot be read.", "Name another folder with --out.") from None
    if state.corpus != corpus:
        raise UserError(f"{folder} holds {state.corpus}, not {corpus}.", "Name another folder with --out.")
    return state


def drop_duplicates(paths: Paths) -> None:
    """Remove every image whose hash an earlier one has; affected shards are rewritten one at a time."""
    seen: list[np.ndarray] = []
    files = sorted(paths.records.glob("*.parquet"))
    for file in files:
        rows = pd.read_parquet(file, columns=["status", HASH])
        seen.append(np.array([int(digest[:16], 16) for digest in rows[HASH][rows.status == GOT]], np.uint64))
    again = pd.Series(np.concatenate(seen) if seen else np.empty(0, np.uint64)).duplicated().to_numpy()
    for file, twice in zip(files, np.split(again, np.cumsum([len(hashes) for hashes in seen])[:-1])):
        if twice.any():
            rows = pd.read_parquet(file)
            places = np.flatnonzero(rows.status == GOT)[twice]
            _rewrite(paths.tar(int(file.stem)), set(rows.key[places]))
            rows.loc[places, ["status", "error_message"]] = DUPLICATE
            _recount(paths, int(file.stem), rows)


def _rewrite(tar: Path, dropped: set[str]) -> None:
    """The tar without some samples, replaced atomically; removed if none is left."""
    with open(tar, "rb") as file:
        spans = [span for span in list_samples(file)[0] if span.key not in dropped]
        if spans:
            copy_samples(file, spans, tar)
        else:
            tar.unlink()


def _recount(paths: Paths, number: int, rows: pd.DataFrame) -> None:
    """Replace the rows of a shard, and their counts."""
    replace_file(paths.rows(number), rows.to_parquet)
    stats = json.loads(paths.stats(number).read_text())
    causes = Counter(rows.error_message.where(rows.status != GOT, GOT))
    stats |= {"count": len(rows), "successes": causes[GOT], "status_dict": dict(causes)}
    replace_text(paths.stats(number), json.dumps(stats, indent=4))


def failed_rows(paths: Paths, causes: list[str], forget: bool = False) -> list[dict]:
    """Rows that failed for one of `causes` ("HTTP 5" stands for HTTP 500 to 599); `forget` takes them from the records,
    once they are planned again.
    """
    taken = []
    for file in sorted(paths.records.glob("*.parquet")):
        rows = pd.read_parquet(file)
        failed = (rows.status != GOT) & rows.error_message.fillna("").str.startswith(tuple(causes))
        taken += rows[failed].to_dict("records")
        if forget and failed.any():
            _recount(paths, int(file.stem), rows[~failed])
    return taken


def finish(paths: Paths, title: str, splits: Iterable[Path], asked: int, dropped: Counter, workers: int) -> None:
    """Write the index of every split, the report, and print it. Raises UserError: there is no image."""
    causes = Counter()
    for split in splits:
        if any(split.glob("*.tar")):
            index_folder(split, workers)
        else:
            (split / "index.json").unlink(missing_ok=True)
        causes += count(Paths(split))
    report = show(title, asked, causes, dropped)
    replace_text(paths.home / "report.json", json.dumps(report, indent=1) + "\n")
    if not report["got"]:
        cause, number = next(iter(report["lost"].items()), ("nothing was requested", 0))
        raise UserError(
            f"No image was stored: {number:,} of {asked:,} failed with '{cause}'.",
            "Fix that (your own hosts need --private-hosts), then run again with --retry-failed, and --retry-causes "
            f"'{cause}' if it is not temporary.",
        )


def count(paths: Paths) -> Counter:
    """Finished rows by cause."""
    causes = Counter()
    for file in paths.records.glob("*_stats.json"):
        for message, number in json.loads(file.read_text())["status_dict"].items():
            cause = message.partition("|")[0]
            causes[NAMES.get(cause, cause)] += number
    return causes


def show(title: str, asked: int, causes: Counter, dropped: Counter) -> dict:
    """Print how many images were asked for, fetched and lost, and why."""
    got, lost = causes[GOT], Counter({cause: n for cause, n in causes.items() if cause != GOT}) + dropped
    report = {"corpus": title, "asked": asked, "got": got, "lost": dict(lost.most_common())}
    report["not_asked_yet"] = asked - got - lost.total()
    counts = {"requested": asked, "fetched": got, **{f"lost: {cause}": n for cause, n in report["lost"].items()}}
    print(title)
    for name, number in (counts | {"not requested yet": report["not_asked_yet"]}).items():
        print(f"  {name:<32} {number:>12,} {100 * number / max(asked, 1):6.1f} %")
    return report
