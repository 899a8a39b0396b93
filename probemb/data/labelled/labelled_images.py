"""Listed images with their labels, of whatever layout."""

from dataclasses import dataclass
from pathlib import Path

from probemb.data.image_loader import Images
from probemb.data.labelled.classes import Classes


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
