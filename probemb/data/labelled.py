"""Labelled images in any of their layouts, the classes in the order of the labels, and prompts that describe these."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

from probemb.data import reading
from probemb.data.image_loader import CLASS_FILES, Images, find_tars, images_under, is_image, list_members, read_samples
from probemb.errors import UserError, nearest

WNID = re.compile(r"n\d{8}")
BUILT_IN = "the built-in ImageNet names"
SINGLE_TEMPLATE = "a photo of a {}."
NAME_CLASSES = "Name a class-name file with --classes (of zeroshot.uncertainty: --class-names)"
Templates = Sequence[str] | dict[str, list[str]]  # for all classes, or the prompts of each class by its name


@dataclass(frozen=True)
class Classes:
    """The classes to choose from."""

    names: tuple[str, ...]  # for prompts, in the order of the labels
    keys: tuple[str, ...] | None  # in the data (WordNet ids, folders); None if only the order is known
    source: str  # for messages

    def __len__(self) -> int:
        return len(self.names)


@dataclass(kw_only=True)
class LabelledImages(Images):
    """Images and their labels."""

    marks: list[int | str]  # of each image its class index, or the name of its class folder
    folders: list[str] | None = None  # all class folders, sorted, also empty ones; None where labels are indices
    class_file: Path | None = None  # classes.json or classes.txt beside the data
    classes: Classes | None = None  # those that the layout has, as the templates
    templates: tuple[str, ...] | None = None


def find_images(data: str | Path, labels: str | Path | None = None, exif: bool = False) -> LabelledImages:
    """List the labelled images under a path, without decoding any.

    Args:
        data: a path of one of LAYOUTS; tars also by a pattern.
        labels: a file of "NAME LABEL" lines for images without a class folder; LABEL is a class index or WordNet id.

    Raises UserError: the path is missing, holds no labelled image, or cannot be read.
    """
    path = Path(data)
    remedy = f"Name {reading.listed(list(LAYOUTS), 'or')}; zeroshot.imagenet also takes plain images with --labels."
    if not path.exists() and not find_tars(path):
        raise UserError(f"The data path {data} does not exist.", remedy)
    if labels is not None:
        found = _read_images(path, _read_labels(Path(labels)))
    else:
        found = next(images for read in LAYOUTS.values() if (images := read(path)) is not None)
    if not found.places:
        why = f"; the first of {len(found.bad)} unusable samples: {': '.join(found.bad[0])}" if found.bad else ""
        raise UserError(f"{data} holds no labelled images{why}.", remedy)
    folder = path if path.is_dir() else Path(found.places[0].file).parent
    class_file = next((folder / name for name in CLASS_FILES if (folder / name).is_file()), None)
    return replace(found, source=str(data), exif=exif, class_file=None if found.classes else class_file)


def find_unlabelled(data: str | Path, exif: bool = False) -> Images:
    """All images of a folder and the folders in it, or of tars. Raises UserError: there is none."""
    path = Path(data)
    places = images_under(path) if path.exists() or find_tars(path) else []
    if not places:
        raise UserError(f"{data} holds no images.", "Name a folder of images, or webdataset shards.")
    return Images(places=places, source=str(data), exif=exif)


# -------------------------------------------------------------------------------------- class folders and label files


def _read_images(path: Path, labels: dict[str, int | str] | None = None) -> LabelledImages:
    """Images whose class is in `labels`, else their folder, on disk or in tars."""
    folders = sorted(one.name for one in path.glob("[!.]*/")) if labels is None else []
    split = next((name for name in ("val", "validation", "test", "train") if name in folders), None)
    if split and not any(map(WNID.fullmatch, folders)):
        raise UserError(f"{path} holds splits, not classes: {', '.join(folders[:5])}.", f"Name {path / split}.")
    marked, bad = [], []
    for place in images_under(path):
        inside = place.name.rpartition(":")[2].removeprefix("./")
        mark = inside.rpartition("/")[0].rpartition("/")[2] if labels is None else labels.get(_stem(inside), "")
        if mark == "":
            bad.append((place.name, "it has no label, and is in no class folder"))
        else:
            marked.append((mark, place))
    if labels is None:
        marked.sort()
    marks, places = [mark for mark, _ in marked], [place for _, place in marked]
    names = None if marks and isinstance(marks[0], int) else sorted({*marks, *folders})
    return LabelledImages(places=places, marks=marks, bad=bad, folders=names, source=str(path))


def _read_labels(path: Path) -> dict[str, int | str]:
    """Class index or WordNet id of each name, without folder and ending; more columns are not read."""
    labels: dict[str, int | str] = {}

    def parse(line: str) -> None:
        words = re.split(r"[,\s]+", line.strip())
        if not labels and words[0].lower() in ("imageid", "name", "filename", "image"):
            return
        if len(words) < 2 or not re.fullmatch(r"[0-9]{1,9}|n\d{8}", words[1]):
            raise ValueError(f"{line[:60]!r} is not NAME and class index (from 0, sorted WordNet ids) or WordNet id")
        mark = int(words[1]) if words[1].isdigit() else words[1]
        if labels.setdefault(_stem(words[0]), mark) != mark:
            raise ValueError(f"it gives {words[0][:100]} another label than a line before")
        if type(mark) is not type(next(iter(labels.values()))):
            raise ValueError("class indices and WordNet ids are mixed")

    reading.parse_lines(path, "a list of labels", parse)
    return labels


def _stem(name: str) -> str:
    base = name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    return base.rpartition(".")[0] if is_image(base) else base


def _read_shards(path: Path, tars: Sequence[Path] = ()) -> LabelledImages | None:
    tars = tars or find_tars(path)
    if not any(member.name.endswith(".cls") for tar in tars for member in list_members(tar)):
        return None
    images, marks = read_samples(tars, ("cls",), lambda sample: sample.label, need_caption=False)
    return LabelledImages(**vars(images), marks=marks)


def _read_benchmark(path: Path) -> LabelledImages | None:
    """A split of CLIP_benchmark, or the test split of its data set.

    classnames.txt                            one name a line; the line is the label
    zeroshot_classification_templates.txt     one template a line, with {c} where the class name goes
    test/nshards.txt, test/0.tar, ...         the number of shards of a split, and KEY.jpg (.png, .webp) with KEY.cls
    """
    split = path if (path / "nshards.txt").is_file() else path / "test"
    count, names, prompts = (split / "nshards.txt", split.parent / "classnames.txt",
                             split.parent / "zeroshot_classification_templates.txt")  # fmt: skip
    if not count.is_file() or not names.is_file():
        return None
    with reading.checked(count, "the number of shards beside it", "Fetch the shards that are missing."):
        tars = sorted(split.glob("*.tar"), key=lambda tar: int(tar.stem))
        if not tars or len(tars) != int(reading.read_text(count)):
            raise ValueError(f"there are {len(tars)}")
    templates = tuple(read_templates(prompts)) if prompts.is_file() else None
    images = _read_shards(split, tars)
    return images and replace(images, classes=read_classes(names), templates=templates)


# The readers give None for data of another layout; the first that does not counts, and the last always gives images.
LAYOUTS: dict[str, Callable[[Path], LabelledImages | None]] = {
    "a data set of CLIP_benchmark": _read_benchmark,
    "webdataset shards with KEY.cls": _read_shards,
    "a folder or tar with a folder for each class": _read_images,
}


def imagenet_classes(keys: tuple[str, ...] | None = None) -> Classes:
    """The 1000 ILSVRC classes under CLIP's names, in the order of the sorted WordNet ids; keys: `imagenet_folders`."""
    return Classes(tuple(IMAGENET_CLASSNAMES), keys, BUILT_IN)


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
    """
    text = reading.read_text(path := Path(path))
    with reading.checked(path, "a class-name file", "Write one class name a line, or a JSON list of names."):
        rows = json.loads(text) if path.suffix.lower() == ".json" else text.rstrip().splitlines()
        if isinstance(rows, dict):
            rows = [{"folder": folder, "name": name} for folder, name in rows.items()]
        rows = [row if isinstance(row, dict) else {"name": row} for row in rows]
        rows = sorted(rows, key=lambda row: row.get("index", 0))
        if [row.get("index", i) for i, row in enumerate(rows)] != list(range(len(rows))):
            raise ValueError(f'its "index" entries are not 0 to {len(rows) - 1}, each once')
        names = [reading.as_text(row.get("name", row.get("open_clip_name")), "a name").strip() for row in rows]
        if not all(names) or not names:
            raise ValueError(f"class {names.index('')} has no name" if names else "it is empty")
    keys = [row.get("wnid", row.get("folder")) for row in rows]
    keys = None if None in keys else tuple(map(str, keys))
    reading.check_unique(keys or (), "class", path)
    return Classes(tuple(names), keys, str(path))


def resolve_classes(images: LabelledImages, wanted: str | None) -> tuple[Classes, list[int]]:
    """The classes to choose from, and the index of each image's class.

    `wanted` is a file, "imagenet", or None: classes.json or classes.txt beside the data, else what its
    layout says, else ImageNet's names if the folders are those of ImageNet or of a variant with a part of its classes,
    or there are 1000 labels, else the names of the class folders. Raises UserError: the classes do not fit the labels.
    """
    folders = images.folders
    n_marks = len(folders if folders is not None else set(images.marks))
    variant = None if folders is None else imagenet_folders(folders)
    if wanted == "imagenet":
        classes = imagenet_classes(variant)
    elif wanted and not Path(wanted).is_file():
        raise UserError(f"There is no file of class names {wanted}.", "Name one that exists, or imagenet.")
    elif wanted or images.class_file:
        classes = read_classes(wanted or images.class_file)
    elif images.classes is not None:
        classes = images.classes
    elif variant is not None:
        kept = [item for item in zip(IMAGENET_CLASSNAMES, variant) if item[1] in folders]
        source = BUILT_IN if len(kept) == len(variant) else f"{BUILT_IN}, {len(kept)} of them"
        classes = Classes(*map(tuple, zip(*kept)), source)
    elif folders is None and n_marks == 1000:
        classes = imagenet_classes()
    elif folders is not None and not any(map(WNID.fullmatch, folders)):
        names = tuple(folder.replace("_", " ").strip() or folder for folder in folders)
        classes = Classes(names, tuple(folders), "the names of the class folders")
    else:
        remedy = f"{NAME_CLASSES}, or imagenet if the labels are ImageNet's."
        raise UserError(f"{images.source} has {n_marks} classes and does not say what they are called.", remedy)
    if not classes.source.startswith(BUILT_IN) and classes.names != tuple(IMAGENET_CLASSNAMES):  # which repeats two
        names = (" ".join(name.casefold().split()) for name in classes.names)
        reading.check_unique(names, "class name", classes.source)
    return classes, assign_labels(images, classes)


def assign_labels(images: LabelledImages, classes: Classes) -> list[int]:
    """Raises UserError if the classes do not fit."""
    if images.folders is None:
        known, marks = [range(len(classes))], images.marks
    else:
        in_order = images.folders if classes.keys is None and len(images.folders) == len(classes) else ()
        known, marks = [classes.keys or (), classes.names, in_order], images.folders
    for keys in known:
        index = {key: i for i, key in enumerate(keys)}
        if set(marks) <= index.keys() and len(index) == len(keys):
            return [index[mark] for mark in images.marks]
    unknown = next(mark for mark in marks if mark not in known[0])
    close = "" if images.folders is None else nearest(unknown, classes.keys or classes.names)
    what = f"The class {unknown} of {images.source} is not one of the {len(classes)} classes of {classes.source}."
    raise UserError(what + close, f"{NAME_CLASSES}: a name for each class in order, or {{folder: name}}.")


def remarks(labels: Sequence[int], classes: Classes) -> list[str]:
    """Reasons why an accuracy over these labels says less: classes without images, a single class."""
    if len(classes) == 1:
        return [f"There is one class, {classes.names[0]}: every image counts as correct, whatever the model says."]
    empty = sorted(set(range(len(classes))) - set(labels))
    if not empty:
        return []
    named = ", ".join(classes.names[i] for i in empty[:3]) + (", …" if len(empty) > 3 else "")
    return [f"{len(empty)} of {len(classes)} classes have no images ({named}): they only compete with the others."]


def imagenet_templates() -> list[str]:
    """CLIP's 80 ImageNet templates, each with one `{}` for the class name."""
    return [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]


class ZeroShotSet(NamedTuple):
    """Images with the index of the class of each, the classes, and templates of their prompts."""

    images: LabelledImages
    labels: list[int]
    classes: Classes
    templates: Templates

    @property
    def prompts(self) -> list[str]:
        """All of a class next to each other."""
        return prompt_texts(self.classes.names, self.templates)

    def only(self, rows: Sequence[int]) -> "ZeroShotSet":
        images = replace(self.images, places=[self.images.places[i] for i in rows])  # `labels` stand for its marks
        return self._replace(images=images, labels=[self.labels[i] for i in rows])


def find_classes(
    data: str, classes: str | None = None, templates: str | None = None, exif: bool = False, labels: str | None = None
) -> ZeroShotSet:
    """Labelled images: see `find_images`, `resolve_classes` and `read_templates`; by default the data's own templates,
    or CLIP's 80. Raises UserError.
    """
    images = find_images(data, labels, exif)
    found, indices = resolve_classes(images, classes)
    own = images.templates if templates is None else None
    return ZeroShotSet(images, indices, found, list(own) if own else read_templates(templates, found.names))


def zero_shot_set(
    data: str, templates: Literal["single", "all"], exif: bool = False, without: str = "pass --no-evaluate.classes"
) -> ZeroShotSet:
    """Images to check while training, with "a photo of a {}." or CLIP's 80 templates. Raises UserError, whose remedy
    ends with the way to go on `without` them.
    """
    try:
        found = find_classes(data, exif=exif)
    except UserError as error:  # whose remedy may name options of zeroshot.imagenet
        remedy = f"Name class folders (docs/data.md sorts ImageNet's) or shards with KEY.cls, or {without}."
        raise UserError(error.what, remedy) from error
    return found._replace(templates=[SINGLE_TEMPLATE] if templates == "single" else imagenet_templates())


def read_templates(path: str | Path | None, class_names: Sequence[str] = ()) -> Templates:
    """CLIP's 80 templates, or those of a file: one a line, each with `{}` (or CLIP_benchmark's `{c}`) where the class
    name goes, or a JSON object {class name: [prompts]} with the same number of prompts for every class.
    """
    if path is None:
        return imagenet_templates()
    path = Path(path)
    if path.suffix.lower() != ".json":
        templates = list(dict.fromkeys(line.replace("{c}", "{}") for line in reading.read_lines(path)))
        if not templates or any(one.count("{}") != 1 for one in templates):
            why = "a line does not hold {} exactly once, or there is none"
            raise reading.malformed(path, "a list of templates", why)
        return templates
    found = reading.read_json(path)
    with reading.checked(path, "a JSON object of prompts", 'Write {"class name": ["prompt", …], …} with all classes.'):
        prompts = {name: reading.as_list(found[name], "the prompts") for name in class_names}
        for text in chain(*prompts.values()):
            reading.as_text(text, "a prompt")
        if len({len(row) for row in prompts.values()} | {0}) != 2:
            raise ValueError("the classes have no prompts, or different numbers of them")
    return prompts


def prompt_texts(class_names: Sequence[str], templates: Templates) -> list[str]:
    """All C x P texts, the prompts of one class next to each other."""
    if isinstance(templates, dict):
        return [prompt for name in class_names for prompt in templates[name]]
    return [template.replace("{}", name) for name in class_names for template in templates]


def count_prompts(templates: Templates) -> int:
    """P of a class."""
    return len(next(iter(templates.values())) if isinstance(templates, dict) else templates)
