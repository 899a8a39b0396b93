"""Data sets in the layout of CLIP_benchmark: webdataset shards with class names and templates beside them.

classnames.txt                            one name a line; the line is the label
zeroshot_classification_templates.txt     one template a line, with {c} where the class name goes
test/nshards.txt                          the number of shards of a split
test/0.tar, test/1.tar, ...               KEY.jpg (or .png, .webp) and KEY.cls
dataset_type.txt                          "retrieval" of a set with KEY.txt in place of KEY.cls, which has no classes
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from probemb.data.labelled.classes import Classes, read_classes, read_text
from probemb.errors import UserError

CLASSES, TEMPLATES, COUNT = "classnames.txt", "zeroshot_classification_templates.txt", "nshards.txt"
TYPE, RETRIEVAL = "dataset_type.txt", "retrieval"
MAX_SHARDS = 100_000


class BenchmarkSplit(NamedTuple):
    """One split: its shards in their order, the classes, and the data set's own templates, if any."""

    tars: list[Path]
    classes: Classes
    templates: tuple[str, ...] | None


def find_split(path: Path) -> BenchmarkSplit | None:
    """The split of a folder, or the test split of a data set's folder; None for any other folder.

    Raises UserError: shards are missing, the files beside them are malformed, or it is a set for retrieval.
    """
    _refuse_retrieval(path)
    if (path / CLASSES).is_file() and (path / "test" / COUNT).is_file():
        root, split = path, path / "test"
    elif (path / COUNT).is_file() and (path.parent / CLASSES).is_file():
        root, split = path.parent, path
    else:
        return None
    text = read_text(split / COUNT, "number of shards", "--data").strip()
    if not text.isdecimal() or len(text) > len(str(MAX_SHARDS)) or not 0 < int(text) <= MAX_SHARDS:
        raise UserError(f"{split / COUNT} holds no number of shards: {text[:40]!r}.", "Fetch the data set again.")
    tars = [split / f"{number}.tar" for number in range(int(text))]
    if missing := [tar for tar in tars if not tar.is_file()]:
        raise UserError(f"{len(missing)} of the {len(tars)} shards are missing, such as {missing[0]}.", "Fetch them.")
    return BenchmarkSplit(tars, read_classes(root / CLASSES), _templates(root / TEMPLATES))


def _refuse_retrieval(path: Path) -> None:
    for root in (path, path.parent) if (path / COUNT).is_file() else (path,):
        if (root / TYPE).is_file() and read_text(root / TYPE, "type of a data set", "--data").strip() == RETRIEVAL:
            split = path if root != path or not (path / "test").is_dir() else path / "test"
            raise UserError(
                f"{root} is a data set for retrieval: its images have captions and no classes.",
                f"Evaluate it with `python -m zeroshot.retrieval --data {split}`.",
            )


def _templates(file: Path) -> tuple[str, ...] | None:
    if not file.is_file():
        return None
    lines = [line.strip() for line in read_text(file, "template file", "--data").splitlines()]
    templates = tuple(dict.fromkeys(line.replace("{c}", "{}") for line in lines if line))
    for line in templates:
        if line.count("{}") != 1:
            raise UserError(
                f"{file} has a line that does not hold {{c}} exactly once: {line[:80]!r}.",
                "Correct it, or name other templates with --templates.",
            )
    return templates or None
