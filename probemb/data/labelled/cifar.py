"""CIFAR-10 and CIFAR-100 from their binary versions; the Python versions are pickles, which can run code when read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from probemb.data.failures import BadSample
from probemb.data.image_loader import Place, read_place
from probemb.data.labelled.classes import Classes, LabelledImages
from probemb.data.reading import MAX_FILE, read_lines
from probemb.errors import UserError

PIXELS = 3 * 32 * 32
REMEDY = "Fetch the binary version from https://www.cs.toronto.edu/~kriz/cifar.html, and name its folder."


class Form(NamedTuple):
    """One of the two data sets.

    Attributes:
        labels: bytes before the pixels; the last one is the label.
        names: the file of the class names; files, test, folder: of the binary version; python: the other's folder.
    """

    name: str
    labels: int
    classes: int
    names: str
    files: re.Pattern
    test: str
    folder: str
    python: str


FORMS = (
    Form("CIFAR-10", 1, 10, "batches.meta.txt", re.compile(r"(data_batch_\d+|test_batch)\.bin"), "test_batch.bin",
         "cifar-10-batches-bin", "cifar-10-batches-py"),
    Form("CIFAR-100", 2, 100, "fine_label_names.txt", re.compile(r"(train|test)\.bin"), "test.bin",
         "cifar-100-binary", "cifar-100-python"),
)  # fmt: skip


@dataclass(kw_only=True)
class CifarImages(LabelledImages):
    """Images of 32 x 32 pixels that are stored as they are: the red plane, the green one, the blue one."""

    def open(self, index: int) -> Image.Image:
        """One image. Raises BadSample."""
        data = read_place(self.places[index])
        if len(data) != PIXELS:
            raise BadSample(f"has {len(data)} of {PIXELS} bytes")
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0).copy())


def find_cifar(path: Path) -> CifarImages | None:
    """The images of a folder (its test file), a file, or a pattern of files; None if it is not CIFAR.

    Raises UserError: files of another size, labels out of range, or the Python version.
    """
    for form in FORMS:
        for folder in (path, path / form.folder):
            if (folder / form.test).is_file() and (folder.name == form.folder or (folder / form.names).is_file()):
                return _read(form, [folder / form.test])
        files = [] if path.is_dir() else [path] if path.is_file() else sorted(map(Path, glob(str(path))))
        if files and all(form.files.fullmatch(file.name) for file in files):
            return _read(form, files)
        if form.python in (path.name, path.parent.name) or (path / form.python).is_dir():
            raise UserError(f"{path} is the Python version of {form.name}: pickles, which can run code.", REMEDY)
    return None


def _read(form: Form, files: list[Path]) -> CifarImages:
    record, places, marks = form.labels + PIXELS, [], []
    for file in files:
        size = file.stat().st_size
        if size == 0 or size % record or size > MAX_FILE:
            raise UserError(f"{file} has {size:,} bytes, and {form.name} has {record:,} for each image.", REMEDY)
        labels = np.fromfile(file, np.uint8).reshape(-1, record)[:, form.labels - 1].tolist()
        if max(labels) >= form.classes:
            raise UserError(f"{file} holds a label {max(labels)}: it is no {form.name}.", REMEDY)
        places += [
            Place(f"{file.name}/{i:05d}", str(file), i * record + form.labels, PIXELS) for i in range(len(labels))
        ]
        marks += labels
    found, names = CifarImages(places=places, marks=marks, source=str(files[0].parent)), files[0].parent / form.names
    if names.is_file():
        found.classes = Classes(tuple(line.replace("_", " ") for line in read_lines(names)), None, str(names))
        if len(found.classes) != form.classes:
            raise UserError(f"{names} has {len(found.classes)} names, and {form.name} {form.classes}.", REMEDY)
    return found
