"""Reports as HTML pages: Jinja2 templates with autoescape, inline SVG figures, images as small JPEGs inside the page.

A page needs no other files. Names of classes, files and models, and captions, are untrusted: they reach a page only
through its template, which escapes them.
"""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from probemb.cli.results import figures_folder, provenance
from probemb.files import replace_file, replace_text
from probemb.reports.text import between, number, percent, printable, signed

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from probemb.reports.figures import Chart

TEMPLATES = Path(__file__).with_name("templates")
THUMBNAIL = 104  # pixels of the longer side


def write_page(file: Path, template: Path, generator: str, **values: object) -> None:
    """Render a template to `file`, and write each of its figures as PDF and PNG to `figures_folder(file)`.

    Args:
        template: may extend `base.html` and import `parts.html`; `{{ figure(chart) }}` shows a Chart.
        generator: the command that writes the page.

    Raises OSError: a file cannot be written. ValueError: two figures have one name.
    """
    folder, shown = figures_folder(file), {}

    def figure(chart: Chart) -> Markup:
        if shown.setdefault(chart.name, chart) is not chart:
            raise ValueError(f"two figures are named {chart.name}")
        return Markup(parts.figure(Markup(chart.svg()), f"{folder.name}/{chart.name}"))

    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(between=between, number=number, percent=percent, signed=signed)
    parts = environment.get_template("parts.html").module
    page = environment.get_template(template.name)
    text = page.render(generator=generator, figure=figure, written=provenance(), **values)
    _remove_figures(file)
    replace_text(file, text)
    for chart in shown.values():
        for kind in ("pdf", "png"):
            replace_file(folder / f"{chart.name}.{kind}", lambda aside: chart.save(aside, kind, generator))  # noqa: B023


def _remove_figures(file: Path) -> None:
    """Remove the figures that an earlier page of the same name links to."""
    if file.exists():
        for name in re.findall(r'href="[\w.-]+/([\w-]+\.(?:pdf|png))"', file.read_text(encoding="utf-8")):
            (figures_folder(file) / name).unlink(missing_ok=True)


def thumbnail(picture: Image.Image | Tensor, side: int | None = None) -> str:
    """A small copy of an image as a data URI; shrinks `picture` itself. Empty for regions, which show nothing.

    side: pixels of the longer one.
    """
    if not hasattr(picture, "thumbnail"):
        return ""
    picture.thumbnail((side, side) if side else (THUMBNAIL * 2, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
