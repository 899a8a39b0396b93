"""Classes of a labelled set of images: their names, in the order of the labels."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from probemb.errors import UserError

WNID = re.compile(r"n\d{8}")
BUILT_IN = "the built-in ImageNet names"
MAX_FILE = 64 << 20  # bytes of a class or template file


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

    def only(self, keys: Sequence[str]) -> "Classes":
        """Those with one of these keys, in the same order."""
        wanted = set(keys)
        kept = [(name, key) for name, key in zip(self.names, self.keys, strict=True) if key in wanted]
        if len(kept) == len(self):
            return self
        names, keys = zip(*kept)
        return Classes(names, keys, f"{self.source}, {len(names)} of them")


def imagenet_classes(keys: Sequence[str] | None = None) -> Classes:
    """The 1000 ILSVRC classes under CLIP's names, in the order of the sorted WordNet ids; keys: `imagenet_folders`."""
    from open_clip import IMAGENET_CLASSNAMES

    return Classes(tuple(IMAGENET_CLASSNAMES), None if keys is None else tuple(keys), BUILT_IN)


def imagenet_folders(folders: Sequence[str]) -> tuple[str, ...] | None:
    """Folder names of all 1000 classes, if these are folders of ImageNet: all or some WordNet ids (ImageNet, -A, -R,
    -Sketch), or the numbers 0 to 999 (ImageNetV2). None for other folders.
    """
    numbers = tuple(str(i) for i in range(1000))
    if set(folders) == set(numbers):
        return numbers
    if folders and all(WNID.fullmatch(folder) for folder in folders):
        wnids = tuple((files("timm") / "data" / "_info" / "imagenet_synsets.txt").read_text().split())
        return wnids if set(folders) <= set(wnids) else None
    return None


def read_classes(path: str | Path) -> Classes:
    """Read a class-name file.

    One of: one name a line; a JSON list of names; a JSON object {folder: name}; a JSON list of objects with a name
    under "name", "open_clip_name" or "class_name", and optionally "index" and a key under "wnid", "key" or "folder".
    Raises UserError: a missing, empty or unreadable file, an empty name, an index that is missing or occurs twice.
    """
    path = Path(path)
    text = read_text(path, "class-name file", "--classes")
    if path.suffix.lower() == ".json":
        names, keys = _classes_from_json(text, path)
    else:
        names, keys = [line.strip() for line in text.splitlines()], None
        while names and not names[-1]:
            names.pop()
    if not names:
        raise UserError(f"The class-name file {path} is empty.", "Write one class name a line.")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"Class {i} in {path} has no name.", "Give every class a name; the line is its label.")
    if keys and len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"{path} lists the class {twice} twice.", "Keep one entry for each class.")
    return Classes(tuple(name.strip() for name in names), tuple(keys) if keys else None, str(path))


def refuse_same_names(classes: Classes) -> None:
    """Raise UserError if two classes have the same prompts; CLIP's own names of ImageNet have two such pairs."""
    names = [" ".join(name.casefold().split()) for name in classes.names]
    if (
        len(set(names)) == len(names)
        or classes.source.startswith(BUILT_IN)
        or classes.names == imagenet_classes().names
    ):
        return
    same = next(name for name in names if names.count(name) > 1)
    first, second = [i for i, name in enumerate(names) if name == same][:2]
    raise UserError(
        f"Classes {first} and {second} of {classes.source} have the same name, {classes.names[second]}.",
        "Their prompts would be the same: give them names that differ, such as `crane bird` and `construction crane`.",
    )


def _classes_from_json(text: str, path: Path) -> tuple[list, list[str] | None]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {str(error)[:200]}.", "Correct the class-name file.") from error
    if isinstance(content, dict) and isinstance(content.get("classes"), list):
        content = content["classes"]
    if isinstance(content, dict):
        return list(content.values()), [str(key) for key in content]
    if not isinstance(content, list):
        raise UserError(f"{path} holds no list of class names.", "Write a JSON list of names, or one name a line.")
    if not any(isinstance(entry, dict) for entry in content):
        return content, None

    def field(entry, *names):
        return next((entry[n] for n in names if isinstance(entry, dict) and n in entry), None)

    indices = [field(entry, "index", "label") for entry in content]
    if any(index is not None for index in indices):
        if sorted(str(i) for i in indices) != sorted(str(i) for i in range(len(content))):
            raise UserError(
                f'The "index" entries of {path} are not 0 to {len(content) - 1}, each once.',
                "Number the classes from 0, without gaps.",
            )
        content = [entry for _, entry in sorted(zip(indices, content), key=lambda pair: int(pair[0]))]
    names = [field(entry, "name", "open_clip_name", "class_name") for entry in content]
    keys = [field(entry, "wnid", "key", "folder") for entry in content]
    return names, None if any(key is None for key in keys) else [str(key) for key in keys]


def read_text(path: Path, what: str, option: str) -> str:
    """The content of a small UTF-8 file. Raises UserError, which names `what` it is and the `option` that gave it."""
    if not path.is_file():
        raise UserError(f"The {what} {path} does not exist.", f"Check the path given to {option}.")
    if path.stat().st_size > MAX_FILE:
        raise UserError(f"The {what} {path} is larger than {MAX_FILE >> 20} MiB.", f"Check the path given to {option}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"The {what} {path} cannot be read as UTF-8 text.", "Save it as UTF-8.") from error
