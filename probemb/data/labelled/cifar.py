"""CIFAR-10 and CIFAR-100 from their binary versions; the Python versions are pickles, which can run code when read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.data.failures import BadSample
from probemb.data.image_loader import Place, read_place
from probemb.data.labelled.classes import Classes, read_text
from probemb.data.labelled.labelled_images import LabelledImages
from probemb.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

PICKLE = b"\x80"  # the first byte of a pickle of protocol 2 or later
SIDE, PIXELS = 32, 3 * 32 * 32
MAX_FILE = 1 << 30  # bytes; the largest of the real ones has 154 MB
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Form(NamedTuple):
    """One of the two data sets.

    Attributes:
        labels: bytes before the pixels; the last one is the label.
        names: the file of the class names; files, test, folder: of the binary version.
        pickles, python: files and folder of the Python version.
    """

    name: str
    labels: int
    classes: int
    names: str
    files: re.Pattern
    test: str
    folder: str
    pickles: re.Pattern
    python: str


FORMS = (
    Form(
        "CIFAR-10", 1, 10, "batches.meta.txt", re.compile(r"(data_batch_\d+|test_batch)\.bin"), "test_batch.bin",
        "cifar-10-batches-bin", re.compile(r"batches\.meta|data_batch_\d+|test_batch"), "cifar-10-batches-py",
    ),
    Form(
        "CIFAR-100", 2, 100, "fine_label_names.txt", re.compile(r"(train|test)\.bin"), "test.bin", "cifar-100-binary",
        re.compile(r"meta|test|train"), "cifar-100-python",
    ),
)  # fmt: skip


@dataclass(kw_only=True)
class CifarImages(LabelledImages):
    """Images of 32 x 32 pixels that are stored as they are: the red plane, the green one, the blue one."""

    def open(self, index: int) -> Image.Image:
        """One image. Raises BadSample."""
        import numpy as np
        from PIL import Image

        data = read_place(self.places[index])
        if len(data) != PIXELS:
            raise BadSample(f"has {len(data)} of {PIXELS} bytes")
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(3, SIDE, SIDE).transpose(1, 2, 0).copy())


def find_cifar(data: str | Path) -> CifarImages | None:
    """The images of a folder (its test file), a file, or a pattern of files; None if it is not CIFAR.

    Raises UserError: files of another size, labels out of range, or the Python version.
    """
    path = Path(data)
    for form in FORMS:
        for folder in (path, path / form.folder):
            if (folder / form.test).is_file() and (folder.name == form.folder or (folder / form.names).is_file()):
                return _read(form, [folder / form.test])
        files = [path] if path.is_file() else [] if path.is_dir() else sorted(map(Path, glob(str(data))))
        if files and all(form.files.fullmatch(file.name) for file in files):
            return _read(form, files)
        _refuse_pickles(form, (path, *_entries(path), *_entries(path / form.python), *files))
    return None


def _entries(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _refuse_pickles(form: Form, files: Iterable[Path]) -> None:
    """Raise UserError for any file of the Python version: named so, and in its folder or with a pickle's first byte."""
    for file in files:
        if not form.pickles.fullmatch(file.name) or not file.is_file():
            continue
        if file.parent.resolve().name != form.python:
            with file.open("rb") as opened:
                if opened.read(1) != PICKLE:
                    continue
        raise UserError(
            f"{file} is of the Python version of {form.name}: pickles, which can run code when they are read.",
            f"Fetch the binary version from {ADDRESS}, and name its folder.",
        )


def _read(form: Form, files: list[Path]) -> CifarImages:
    import numpy as np

    record, places, marks = form.labels + PIXELS, [], []
    for file in files:
        size = file.stat().st_size
        if size == 0 or size % record or size > MAX_FILE:
            raise UserError(
                f"{file} has {size:,} bytes, and {form.name} has {record:,} for each image.",
                f"Fetch its binary version again from {ADDRESS}.",
            )
        label = np.fromfile(file, np.uint8).reshape(-1, record)[:, form.labels - 1]
        if int(label.max()) >= form.classes:
            raise UserError(f"{file} holds a label {label.max()}: it is no {form.name}.", "Check the path.")
        for i in range(len(label)):
            places.append(Place(f"{file.name}/{i:05d}", str(file), i * record + form.labels, PIXELS))
        marks += label.tolist()
    found = CifarImages(places=places, marks=marks, source=str(files[0].parent))
    names = files[0].parent / form.names
    if names.is_file():
        lines = [line.strip().replace("_", " ") for line in read_text(names, "class names", "--data").splitlines()]
        found.classes = Classes(tuple(line for line in lines if line), None, str(names))
        if len(found.classes) != form.classes:
            raise UserError(
                f"{names} has {len(found.classes)} names, and {form.name} {form.classes} classes.", "Fetch it again."
            )
    return found
