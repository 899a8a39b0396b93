"""Labelled images in class folders, webdataset shards or tars, and the classes of their labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from probemb.data.captions.webdataset import CLASS_FILES, walk_samples
from probemb.data.failures import BadSample
from probemb.data.image_loader import Place, find_tars, list_members
from probemb.data.labelled.cifar import find_cifar
from probemb.data.labelled.classes import (
    WNID,
    Classes,
    LabelledImages,
    imagenet_classes,
    imagenet_folders,
    read_classes,
    read_templates,
    refuse_same_names,
)
from probemb.data.reading import malformed, parse_lines, read_text
from probemb.data.shards.samples import IMAGE_EXTENSIONS, parse_sample, read_sample
from probemb.errors import UserError, nearest

MAKE_SCENES = "or make the synthetic data with `python -m tools.make_scenes data/scenes` and name a folder in it"


def find_images(data: str | Path, labels: str | Path | None = None, exif: bool = False) -> LabelledImages:
    """List the labelled images under a path, without decoding any.

    Args:
        data: a folder of class folders, a folder (or pattern) of webdataset shards with KEY.cls, or one tar whose
            members are CLASS/NAME.jpg, or KEY.jpg with KEY.cls, or NAME.jpg together with `labels`; CIFAR's binary
            files, or a data set of CLIP_benchmark.
        labels: a file of "NAME LABEL" lines for images without a class folder; LABEL is a class index or WordNet id.
        exif: turn images as their EXIF orientation says.

    Raises UserError: the path is missing, holds no labelled image, or cannot be read.
    """
    path = Path(data)
    given = None if labels is None else _read_labels(Path(labels))
    if given is None and (cifar := find_cifar(path)) is not None:
        return cifar
    benchmark = None if given is not None else _benchmark_split(path)
    tars = benchmark[0] if benchmark else find_tars(data)
    if not tars and not path.is_dir():
        raise UserError(
            f"The data path {data} does not exist.",
            f"Name a folder of class folders, of webdataset shards, or a tar, {MAKE_SCENES}.",
        )
    found = _from_tars(tars, given) if tars else _from_folders(path, given)
    if not found.places:
        why = f"; the first of {len(found.bad)} unusable samples: {': '.join(found.bad[0])}" if found.bad else ""
        raise UserError(
            f"{data} holds no labelled images{why}.",
            "Put images into one folder a class, or beside KEY.cls in webdataset shards, or list them in --labels.",
        )
    folder = path if path.is_dir() else tars[0].parent
    class_file = next((folder / name for name in CLASS_FILES if (folder / name).is_file()), None)
    classes, templates = benchmark[1:] if benchmark else (None, None)
    return replace(found, source=str(data), exif=exif, class_file=class_file, classes=classes, templates=templates)


def _is_image(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and base.rpartition(".")[2].lower() in IMAGE_EXTENSIONS


def _from_folders(path: Path, given: dict[str, int | str] | None) -> LabelledImages:
    if given is not None:
        names = sorted(entry.name for entry in path.iterdir() if entry.is_file() and _is_image(entry.name))
        return _listed([Place(name, str(path / name)) for name in names], given, str(path))
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    split = next((name for name in ("val", "validation", "test", "train") if name in folders), None)
    if split and not any(map(WNID.fullmatch, folders)):
        raise UserError(f"{path} holds splits, not classes: {', '.join(folders[:5])}.", f"Say --data {path / split}.")
    places = [
        Place(f"{folder}/{name}", str(path / folder / name))
        for folder in folders
        for name in sorted(entry.name for entry in (path / folder).iterdir() if _is_image(entry.name))
    ]
    marks = [place.name.partition("/")[0] for place in places]
    return LabelledImages(places=places, marks=marks, folders=folders, source=str(path))


def _from_tars(tars: Sequence[Path], given: dict[str, int | str] | None) -> LabelledImages:
    source, labelled, plain = str(tars[0]), [], []
    for tar in tars:
        (labelled if any(member.name.endswith(".cls") for member in list_members(tar)) else plain).append(tar)
    if labelled and plain:
        raise UserError(f"{source} mixes shards with and without KEY.cls.", "Name the labelled shards alone.")
    if labelled:
        return _from_shards(labelled)
    images = []
    for tar in tars:
        prefix = f"{tar.name}:" if len(tars) > 1 else ""
        members = [member for member in list_members(tar) if _is_image(member.name)]
        images += [Place(prefix + member.name, str(tar), member.offset, member.size) for member in members]
    if given is not None:
        return _listed(images, given, source)
    if any("/" not in image.name.removeprefix("./") for image in images):
        raise UserError(
            f"{source} holds images, such as {images[0].name}, without a class folder and without KEY.cls.",
            'Give their labels with --labels FILE, one "NAME LABEL" a line (LABEL: class index or WordNet id).',
        )
    marked = sorted((image.name.rsplit("/", 2)[-2].rsplit(":", 1)[-1], image) for image in images)
    marks = [mark for mark, _ in marked]
    return LabelledImages(places=[image for _, image in marked], marks=marks, folders=sorted(set(marks)), source=source)


def _from_shards(tars: Sequence[Path]) -> LabelledImages:
    found = LabelledImages(places=[], marks=[], source=str(tars[0]))
    for name, place, span, file in walk_samples(tars):
        if place is None:
            continue
        try:
            label = {ext: member for ext, member in span.parts.items() if ext == "cls"}
            words = read_sample(file.fileno(), span._replace(parts=label))
            sample = parse_sample({"jpg": b"-", **words}, need_caption=False)
        except BadSample as error:
            found.bad.append((name, str(error)))
            continue
        found.places.append(place)
        found.marks.append(sample.label)
    return found


def _read_labels(path: Path) -> dict[str, int | str]:
    labels: dict[str, int | str] = {}

    def parse(line: str) -> None:
        words = re.split(r"[,\s]+", line.strip())
        if not labels and words[0].lower() in ("imageid", "name", "filename", "image"):
            return
        if len(words) < 2 or not (re.fullmatch("[0-9]{1,9}", words[1]) or WNID.fullmatch(words[1])):
            raise ValueError(f"{line[:60]!r} is not NAME and class index (from 0, sorted WordNet ids) or WordNet id")
        mark = int(words[1]) if words[1].isdigit() else words[1]
        if labels.setdefault(_stem(words[0]), mark) != mark:
            raise ValueError(f"it gives {words[0][:100]} another label than a line before")

    parse_lines(path, "a list of labels", parse)
    return labels


def _stem(name: str) -> str:
    base = name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    return base.rpartition(".")[0] if _is_image(base) else base


def _listed(places: list[Place], given: dict[str, int | str], source: str) -> LabelledImages:
    missing = [place.name for place in places if _stem(place.name) not in given]
    if missing:
        raise UserError(f"--labels lacks {len(missing)} of {len(places)} images, such as {missing[0]}.", "Add them.")
    marks = [given[_stem(place.name)] for place in places]
    by_name = {isinstance(mark, str) for mark in marks}
    if len(by_name) > 1:
        raise UserError("--labels mixes class indices and WordNet ids.", "Use one of them throughout.")
    folders = sorted(set(marks)) if by_name == {True} else None
    return LabelledImages(places=places, marks=marks, folders=folders, source=source)


# ---------------------------------------------------------------------------------------------------- CLIP_benchmark


def _benchmark_split(path: Path) -> tuple[list[Path], Classes, tuple[str, ...] | None] | None:
    """Shards in their order, classes and templates of a split of CLIP_benchmark, or of the test split of its data set.

    classnames.txt                            one name a line; the line is the label
    zeroshot_classification_templates.txt     one template a line, with {c} where the class name goes
    test/nshards.txt                          the number of shards of a split
    test/0.tar, test/1.tar, ...               KEY.jpg (or .png, .webp) and KEY.cls
    dataset_type.txt                          "retrieval" of a set with KEY.txt in place of KEY.cls, without classes

    None for any other folder. Raises UserError: shards are missing, malformed files, or a set for retrieval.
    """
    split = path if (path / "nshards.txt").is_file() else path / "test"
    root, count = split.parent, split / "nshards.txt"
    kind = root / "dataset_type.txt"
    if kind.is_file() and read_text(kind).strip() == "retrieval":
        raise UserError(
            f"{root} is a data set for retrieval: its images have captions and no classes.",
            f"Evaluate it with `python -m zeroshot.retrieval --data {split if split.is_dir() else path}`.",
        )
    if not count.is_file() or not (root / "classnames.txt").is_file():
        return None
    number = read_text(count).strip()
    if not re.fullmatch("[1-9][0-9]{0,4}", number):
        raise malformed(count, "the number of shards", f"it holds {number[:40]!r}")
    tars = [split / f"{i}.tar" for i in range(int(number))]
    if missing := [tar for tar in tars if not tar.is_file()]:
        raise UserError(f"{len(missing)} of the {len(tars)} shards are missing, such as {missing[0]}.", "Fetch them.")
    file = root / "zeroshot_classification_templates.txt"
    templates = tuple(read_templates(file)) if file.is_file() else None
    return tars, read_classes(root / "classnames.txt"), templates


# ----------------------------------------------------------------------------------------------------------- classes


def resolve_classes(images: LabelledImages, wanted: str | None) -> tuple[Classes, list[int]]:
    """The classes to choose from, and the index of each image's class.

    `wanted` (--classes) is a file, "imagenet", or None: classes.json or classes.txt beside the data, else what its
    layout says, else ImageNet's names if the folders are those of ImageNet or of a variant with a part of its classes,
    or there are 1000 labels, else the names of the class folders. Raises UserError: the classes do not fit the labels.
    """
    folders = images.folders
    n_marks = len(folders if folders is not None else set(images.marks))
    variant = None if folders is None else imagenet_folders(folders)
    if wanted == "imagenet":
        classes = imagenet_classes(variant)
    elif wanted or images.class_file:
        classes = read_classes(wanted or images.class_file)
    elif images.classes is not None:
        classes = images.classes
    elif variant is not None:
        classes = imagenet_classes(variant).only(folders)
    elif folders is None and n_marks == 1000:
        classes = imagenet_classes()
    elif folders is not None and not any(map(WNID.fullmatch, folders)):
        names = tuple(folder.replace("_", " ").strip() or folder for folder in folders)
        classes = Classes(names, tuple(folders), "the names of the class folders")
    else:
        raise UserError(
            f"{images.source} has {n_marks} classes and does not say what they are called.",
            "Name a class-name file with --classes, or say --classes imagenet if the labels are ImageNet's.",
        )
    refuse_same_names(classes)
    return classes, assign_labels(images, classes)


def remarks(labels: Sequence[int], classes: Classes) -> list[str]:
    """Reasons why an accuracy over these labels says less: classes without images, a single class."""
    if len(classes) == 1:
        return [f"There is one class, {classes.names[0]}: every image counts as correct, whatever the model says."]
    empty = sorted(set(range(len(classes))) - set(labels))
    if not empty:
        return []
    named = ", ".join(classes.names[i] for i in empty[:3]) + (", …" if len(empty) > 3 else "")
    return [f"{len(empty)} of {len(classes)} classes have no images ({named}): they only compete with the others."]


def assign_labels(images: LabelledImages, classes: Classes) -> list[int]:
    """Index of each image's class. Raises UserError if the classes do not fit."""
    remedy = "Pass --classes the file that belongs to this data."
    if images.folders is None:
        for place, mark in zip(images.places, images.marks):
            if mark >= len(classes):
                what = f"{place.name} has label {mark}, but there are only {len(classes)} class names"
                raise UserError(f"{what} in {classes.source}.", remedy)
        return list(images.marks)
    for keys in (classes.keys, classes.names):
        if keys is not None and set(images.folders) <= set(keys) and len(set(keys)) == len(keys):
            break
    else:
        if classes.keys is not None:
            unknown = next(folder for folder in images.folders if folder not in classes.keys)
            what = f"The class folder {unknown} of {images.source} is not in {classes.source}."
            raise UserError(what + nearest(unknown, classes.keys), remedy)
        keys = images.folders
        if len(keys) != len(classes):
            raise UserError(
                f"{images.source} has {len(keys)} class folders, but there are {len(classes)} class names in "
                f"{classes.source}.",
                "Pass --classes a file with one name for each folder in sorted order, or a JSON object {folder: name}.",
            )
    place = {key: i for i, key in enumerate(keys)}
    return [place[mark] for mark in images.marks]
