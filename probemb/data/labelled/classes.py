"""Labelled images, their classes in the order of the labels, and prompts that describe these."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path

from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

from probemb.data.image_loader import Images
from probemb.data.reading import as_list, as_text, check_unique, checked, malformed, read_json, read_lines, read_text
from probemb.errors import UserError

WNID = re.compile(r"n\d{8}")
BUILT_IN = "the built-in ImageNet names"
SINGLE_TEMPLATE = "a photo of a {}."
Templates = Sequence[str] | dict[str, list[str]]  # for all classes, or the prompts of each class by its name


@dataclass(frozen=True)
class Classes:
    """The classes to choose from.

    Attributes:
        names: for prompts, in the order of the labels.
        keys: name of each class in the data (a WordNet id, a folder), or None if only the order is known.
        source: for messages.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] | None
    source: str

    def __len__(self) -> int:
        return len(self.names)

    def only(self, keys: Sequence[str]) -> Classes:
        """Those with one of these keys, in the same order."""
        kept = [(name, key) for name, key in zip(self.names, self.keys, strict=True) if key in set(keys)]
        if len(kept) == len(self):
            return self
        return Classes(*map(tuple, zip(*kept)), f"{self.source}, {len(kept)} of them")


@dataclass(kw_only=True)
class LabelledImages(Images):
    """Images and their labels.

    Attributes:
        marks: the label in the data: a class index, or the name of the class folder.
        folders: all class folders in sorted order, including empty ones; None where labels are indices.
        class_file: classes.json or classes.txt beside the data.
        classes, templates: what the data's own layout says; None without.
    """

    marks: list[int | str]
    folders: list[str] | None = None
    class_file: Path | None = None
    classes: Classes | None = None
    templates: tuple[str, ...] | None = None


def imagenet_classes(keys: Sequence[str] | None = None) -> Classes:
    """The 1000 ILSVRC classes under CLIP's names, in the order of the sorted WordNet ids; keys: `imagenet_folders`."""
    return Classes(tuple(IMAGENET_CLASSNAMES), None if keys is None else tuple(keys), BUILT_IN)


def imagenet_folders(folders: Sequence[str]) -> tuple[str, ...] | None:
    """Folder names of all 1000 classes, if these are folders of ImageNet: all or some WordNet ids (ImageNet, -A, -R,
    -Sketch), or the numbers 0 to 999 (ImageNetV2). None for other folders.
    """
    numbers = tuple(map(str, range(1000)))
    if set(folders) == set(numbers):
        return numbers
    if folders and all(map(WNID.fullmatch, folders)):
        wnids = tuple((files("timm") / "data" / "_info" / "imagenet_synsets.txt").read_text().split())
        return wnids if set(folders) <= set(wnids) else None
    return None


def read_classes(path: str | Path) -> Classes:
    """Read a class-name file.

    One of: one name a line; a JSON list of names; a JSON object {folder: name}; a JSON list of objects with a "name"
    (or "open_clip_name"), and optionally an "index" and a "wnid" or "folder".
    Raises UserError: a missing, empty or unreadable file, an empty name, an index that is missing or occurs twice.
    """
    path, keys = Path(path), None
    text = read_text(path)
    with checked(path, "a class-name file", "Write one class name a line, or a JSON list of names."):
        if path.suffix.lower() == ".json":
            names, keys = _classes_from_json(json.loads(text))
        else:
            names = [line.strip() for line in text.rstrip().splitlines()]
        for i, name in enumerate(names):
            if not isinstance(name, str) or not name.strip():
                raise ValueError(f"class {i} has no name")
        if not names:
            raise ValueError("it is empty")
    check_unique(keys or (), "class", path)
    return Classes(tuple(name.strip() for name in names), tuple(keys) if keys else None, str(path))


def _classes_from_json(content: object) -> tuple[list, list[str] | None]:
    """Names and keys. Raises ValueError, KeyError, TypeError."""
    if isinstance(content, dict):
        return list(content.values()), list(content)
    if not all(isinstance(entry, dict) for entry in content):
        return list(content), None
    if any("index" in entry for entry in content):
        content = sorted(content, key=lambda entry: entry["index"])
        if [entry["index"] for entry in content] != list(range(len(content))):
            raise ValueError(f'its "index" entries are not 0 to {len(content) - 1}, each once')
    names = [entry.get("name", entry.get("open_clip_name")) for entry in content]
    keys = [entry.get("wnid", entry.get("folder")) for entry in content]
    return names, None if None in keys else list(map(str, keys))


def refuse_same_names(classes: Classes) -> None:
    """Raise UserError if two classes have the same prompts; CLIP's own names of ImageNet have two such pairs."""
    if classes.source.startswith(BUILT_IN) or classes.names == tuple(IMAGENET_CLASSNAMES):
        return
    seen: dict[str, int] = {}
    for i, name in enumerate(classes.names):
        first = seen.setdefault(" ".join(name.casefold().split()), i)
        if first != i:
            raise UserError(
                f"Classes {first} and {i} of {classes.source} have the same name, {name}.",
                "Give them names that differ, such as `crane bird` and `construction crane`.",
            )


# ----------------------------------------------------------------------------------------------------------- prompts


def imagenet_templates() -> list[str]:
    """CLIP's 80 ImageNet templates, each with one `{}` for the class name."""
    return [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]


def read_templates(path: str | Path | None, class_names: Sequence[str] = ()) -> Templates:
    """CLIP's 80 templates, or those of a file: one a line, each with `{}` (or CLIP_benchmark's `{c}`) where the class
    name goes, or a JSON object {class name: [prompts]} with the same number of prompts for every class.

    Raises UserError: a missing or empty file, a template without `{}`, a class without prompts.
    """
    if path is None:
        return imagenet_templates()
    path = Path(path)
    if path.suffix.lower() != ".json":
        templates = list(dict.fromkeys(line.replace("{c}", "{}") for line in read_lines(path)))
        if not templates or any(one.count("{}") != 1 for one in templates):
            raise malformed(path, "a list of templates", "a line does not hold {} exactly once, or there is none")
        return templates
    found = read_json(path)
    with checked(path, "a JSON object of prompts", 'Write {"class name": ["prompt", …], …} with all classes.'):
        prompts = {name: as_list(found[name], "the prompts") for name in class_names}
        for text in chain(*prompts.values()):
            as_text(text, "a prompt")
        if len({len(row) for row in prompts.values()} | {0}) != 2:
            raise ValueError("the classes have no prompts, or different numbers of them")
    return prompts


def prompt_texts(class_names: Sequence[str], templates: Templates) -> list[str]:
    """All C x P texts, the prompts of one class next to each other."""
    if isinstance(templates, dict):
        return [prompt for name in class_names for prompt in templates[name]]
    return [template.replace("{}", name) for name in class_names for template in templates]


def count_prompts(templates: Templates) -> int:
    """P, the number of prompts of a class."""
    return len(next(iter(templates.values())) if isinstance(templates, dict) else templates)
