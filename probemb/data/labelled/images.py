"""Labelled images in class folders, webdataset shards or tars, and the classes of their labels."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from probemb.data.failures import BadSample
from probemb.data.image_loader import Place, find_tars, list_members
from probemb.data.labelled.cifar import find_cifar
from probemb.data.labelled.classes import (
    WNID,
    Classes,
    imagenet_classes,
    imagenet_folders,
    read_classes,
    read_text,
    refuse_same_names,
)
from probemb.data.labelled.clip_benchmark import find_split
from probemb.data.labelled.labelled_images import LabelledImages
from probemb.data.shards.samples import IMAGE_EXTENSIONS, group_members, parse_sample
from probemb.errors import UserError, nearest

_INDEX = re.compile(r"[0-9]{1,9}")  # of a class
CLASS_FILES = ("classes.json", "classes.txt")
MAKE_SCENES = "or make the synthetic data with `python -m tools.make_scenes data/scenes` and name a folder in it"


def find_images(data: str | Path, labels: str | Path | None = None, exif: bool = False) -> LabelledImages:
    """List the labelled images under a path, without decoding any.

    Args:
        data: a folder of class folders, a folder (or pattern) of webdataset shards with KEY.cls, or one tar whose
            members are CLASS/NAME.jpg, or KEY.jpg with KEY.cls, or NAME.jpg together with `labels`; CIFAR's binary
            files (`find_cifar`), or a data set of CLIP_benchmark (`find_split`).
        labels: a file of "NAME LABEL" lines for images without a class folder; LABEL is a class index or WordNet id.
        exif: turn images as their EXIF orientation says.

    Raises UserError: the path is missing, holds no labelled image, or cannot be read.
    """
    path = Path(data)
    given = _read_labels(Path(labels)) if labels is not None else None
    if given is None and (cifar := find_cifar(data)) is not None:
        return cifar
    benchmark = find_split(path) if given is None else None
    tars = benchmark.tars if benchmark else find_tars(data)
    if not tars and not path.is_dir():
        raise UserError(
            f"The data path {data} does not exist.",
            f"Name a folder of class folders, of webdataset shards, or a tar, {MAKE_SCENES}.",
        )
    found = _from_tars(tars, given) if tars else _from_folders(path, given)
    found.source, found.exif = str(data), exif
    folder = path if path.is_dir() else tars[0].parent
    if benchmark:
        found.classes, found.templates = benchmark.classes, benchmark.templates
    found.class_file = next((folder / name for name in CLASS_FILES if (folder / name).is_file()), None)
    if not found.places:
        why = f"; the first of {len(found.bad)} unusable samples: {': '.join(found.bad[0])}" if found.bad else ""
        raise UserError(
            f"{data} holds no labelled images{why}.",
            "Put images into one folder a class, or beside KEY.cls in webdataset shards, or list them in --labels.",
        )
    return found


def _is_image(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and base.rpartition(".")[2].lower() in IMAGE_EXTENSIONS


def _from_folders(path: Path, given: dict[str, int | str] | None) -> LabelledImages:
    if given is not None:
        names = sorted(entry.name for entry in path.iterdir() if entry.is_file() and _is_image(entry.name))
        return _listed([Place(name, str(path / name)) for name in names], given, str(path))
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if set(folders) & {"train", "val", "validation", "test"} and not any(WNID.fullmatch(f) for f in folders):
        split = next(name for name in ("val", "validation", "test", "train") if name in folders)
        raise UserError(f"{path} holds splits, not classes: {', '.join(folders[:5])}.", f"Say --data {path / split}.")
    places, marks = [], []
    for folder in folders:
        for name in sorted(entry.name for entry in (path / folder).iterdir() if _is_image(entry.name)):
            places.append(Place(f"{folder}/{name}", str(path / folder / name)))
            marks.append(folder)
    return LabelledImages(places=places, marks=marks, folders=folders, source=str(path))


def _from_tars(tars: Sequence[Path], given: dict[str, int | str] | None) -> LabelledImages:
    found = LabelledImages(places=[], marks=[], source=str(tars[0]))
    images: list[Place] = []
    for tar in tars:
        prefix = f"{tar.name}:" if len(tars) > 1 else ""
        members = list_members(tar)
        if not any(member.name.endswith(".cls") for member in members):
            images += [Place(prefix + m.name, str(tar), m.offset, m.size) for m in members if _is_image(m.name)]
            continue
        with open(tar, "rb") as file:
            for span in group_members(members):
                image = next((span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts), None)
                if image is None:
                    continue
                try:
                    label = _class_index(file.fileno(), span)
                except BadSample as error:
                    found.bad.append((prefix + span.key, str(error)))
                    continue
                found.places.append(Place(prefix + span.key, str(tar), image.offset, image.size))
                found.marks.append(label)
    if not images:
        return found
    if given is not None:
        return _listed(images, given, found.source)
    if found.places:
        raise UserError(f"{found.source} mixes shards with and without KEY.cls.", "Name the labelled shards alone.")
    if any("/" not in image.name.removeprefix("./") for image in images):
        raise UserError(
            f"{found.source} holds images, such as {images[0].name}, without a class folder and without KEY.cls.",
            'Give their labels with --labels FILE, one "NAME LABEL" a line (LABEL: class index or WordNet id).',
        )
    marks = [image.name.rsplit("/", 2)[-2].rsplit(":", 1)[-1] for image in images]
    order = sorted(range(len(images)), key=lambda i: (marks[i], images[i].name))
    places, marks = [images[i] for i in order], [marks[i] for i in order]
    return LabelledImages(places=places, marks=marks, folders=sorted(set(marks)), source=found.source)


def _class_index(fd: int, span) -> int:
    member = span.parts.get("cls")
    if member is None:
        raise BadSample("there is no KEY.cls")
    if member.size > 64:
        raise BadSample("the cls is not a class index")
    return parse_sample({"jpg": b"-", "cls": os.pread(fd, member.size, member.offset)}, need_caption=False).label


def _read_labels(path: Path) -> dict[str, int | str]:
    labels: dict[str, int | str] = {}
    for number, line in enumerate(read_text(path, "label file", "--labels").splitlines(), 1):
        words = re.split(r"[,\s]+", line.strip())
        if words == [""] or (number == 1 and words[0].lower() in ("imageid", "name", "filename", "image")):
            continue
        if len(words) < 2 or not (_INDEX.fullmatch(words[1]) or WNID.fullmatch(words[1])):
            raise UserError(
                f"Line {number} of {path} is not NAME LABEL: {line[:60]!r}.",
                "Write the image's file name and its class index (from 0, sorted WordNet ids) or its WordNet id.",
            )
        mark = int(words[1]) if _INDEX.fullmatch(words[1]) else words[1]
        if labels.setdefault(_stem(words[0]), mark) != mark:
            raise UserError(
                f"Line {number} of {path} gives {words[0][:100]} another label than a line before.",
                "Write one line for each image; those of one name in several folders cannot be told apart here.",
            )
    return labels


def _stem(name: str) -> str:
    base = name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    return base.rpartition(".")[0] if _is_image(base) else base


def _listed(places: list[Place], given: dict[str, int | str], source: str) -> LabelledImages:
    missing = [place.name for place in places if _stem(place.name) not in given]
    if missing:
        raise UserError(
            f"--labels lacks {len(missing)} of {len(places)} images, such as {missing[0]}.",
            "Give one line for every image.",
        )
    marks = [given[_stem(place.name)] for place in places]
    by_name = {isinstance(mark, str) for mark in marks}
    if len(by_name) > 1:
        raise UserError("--labels mixes class indices and WordNet ids.", "Use one of them throughout.")
    folders = sorted(set(marks)) if by_name == {True} else None
    return LabelledImages(places=places, marks=marks, folders=folders, source=source)


def resolve_classes(images: LabelledImages, wanted: str | None) -> tuple[Classes, list[int]]:
    """The classes to choose from, and the index of each image's class.

    `wanted` (--classes) is a file, "imagenet", or None: classes.json or classes.txt beside the data, else what its
    layout says, else ImageNet's names if the folders are those of ImageNet or of a variant with a part of its classes,
    or there are 1000 labels, else the names of the class folders. Raises UserError: the classes do not fit the labels.
    """
    n_marks = len(images.folders) if images.folders is not None else len(set(images.marks))
    variant = imagenet_folders(images.folders) if images.folders is not None else None
    if wanted == "imagenet":
        classes = imagenet_classes() if variant is None else imagenet_classes(variant)
    elif wanted is not None:
        classes = read_classes(wanted)
    elif images.class_file is not None:
        classes = read_classes(images.class_file)
    elif images.classes is not None:
        classes = images.classes
    elif variant is not None:
        classes = imagenet_classes(variant).only(images.folders)
    elif n_marks == 1000 and images.folders is None:
        classes = imagenet_classes()
    elif images.folders is not None and not any(WNID.fullmatch(f) for f in images.folders):
        names = tuple(folder.replace("_", " ").strip() or folder for folder in images.folders)
        classes = Classes(names, tuple(images.folders), "the names of the class folders")
    else:
        raise UserError(
            f"{images.source} has {n_marks} classes and does not say what they are called.",
            "Name a class-name file with --classes, or say --classes imagenet if the labels are ImageNet's.",
        )
    refuse_same_names(classes)
    return classes, assign_labels(images, classes)


def remarks(labels: Sequence[int], classes: Classes) -> list[str]:
    """Sentences on what makes an accuracy over these labels say less: classes without images, a single class."""
    if len(classes) == 1:
        return [f"There is one class, {classes.names[0]}: every image counts as correct, whatever the model says."]
    empty = sorted(set(range(len(classes))) - set(labels))
    if not empty:
        return []
    named = ", ".join(classes.names[i] for i in empty[:3]) + (", …" if len(empty) > 3 else "")
    return [f"{len(empty)} of {len(classes)} classes have no images ({named}): they only compete with the others."]


def assign_labels(images: LabelledImages, classes: Classes) -> list[int]:
    """Index of each image's class. Raises UserError if the classes do not fit."""
    if images.folders is None:
        for place, mark in zip(images.places, images.marks):
            if mark >= len(classes):
                raise UserError(
                    f"{place.name} has label {mark}, but there are only {len(classes)} class names (0 to "
                    f"{len(classes) - 1}) in {classes.source}.",
                    "Pass --classes the file that belongs to this data.",
                )
        return [int(mark) for mark in images.marks]
    for keys in (classes.keys, classes.names):
        if keys is not None and set(images.folders) <= set(keys) and len(set(keys)) == len(keys):
            place = {key: i for i, key in enumerate(keys)}
            return [place[mark] for mark in images.marks]
    if classes.keys is not None:
        unknown = next(folder for folder in images.folders if folder not in classes.keys)
        what = f"The class folder {unknown} of {images.source} is not in {classes.source}."
        remedy = "Pass --classes the file that belongs to this data."
        raise UserError(what + nearest(unknown, classes.keys), remedy)
    if len(images.folders) != len(classes):
        raise UserError(
            f"{images.source} has {len(images.folders)} class folders, but there are {len(classes)} class names in "
            f"{classes.source}.",
            "Pass --classes a file with one name for each folder in sorted order, or a JSON object {folder: name}.",
        )
    place = {folder: i for i, folder in enumerate(images.folders)}
    return [place[mark] for mark in images.marks]
