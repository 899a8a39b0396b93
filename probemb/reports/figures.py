"""Figures of reports, drawn with matplotlib: SVG inside a page, and PDF and PNG files for papers.

Nothing here touches pyplot or the user's matplotlib settings. The colours suit colour-blind readers.
"""

import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Self

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from probemb.reports.text import number, printable

BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0068a8", "#b8560f", "#00785a", "#8f4a86", "#6a7480", "#1f2733"
GOLD, RED, TEAL, PINK = "#8a6d00", "#c02f3c", "#2b8c8c", "#c05a9a"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GOLD, TEAL, PINK, GREY, INK)
WIDTH, HEIGHT = 5.2, 3.0  # inches
LEGEND = 80  # letters of names in a row of the legend
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e3e7ec",
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.5,
    "svg.fonttype": "path",  # the same letters everywhere
    "pdf.fonttype": 42,
}
_styled = context(["default", _STYLE])  # run with this module's style over matplotlib's defaults


def _legend_width(names: Sequence[str], columns: int) -> int:
    """In letters; a column is as wide as its longest name."""
    return sum(6 + max(map(len, part)) for part in np.array_split(names, columns) if len(part))


class Chart:
    """One figure with one pair of axes; name: of its files, unique within a page."""

    @_styled
    def __init__(self, name: str, *, x_label: str, y_label: str):
        self.name, self._x_label, self._y_label = name, x_label, y_label
        self._figure = Figure(figsize=(WIDTH, HEIGHT), dpi=72, layout="constrained")  # at 72 a pixel is a point
        self._axes = self._figure.add_subplot(xlabel=printable(x_label), ylabel=printable(y_label))
        for axis in (self._axes.xaxis, self._axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
        self._notes: list[tuple[float, float, float, str]] = []  # (x, y, radius, text) under the pointer
        self._finished = False

    @_styled
    def line(
        self, xs: Sequence[float], ys: Sequence[float], name: str = "", colour: str = BLUE, *, dashed: bool = False,
        points: bool = False, spread: Sequence[float] | None = None, notes: Sequence[str] | None = None,
    ) -> Self:  # fmt: skip
        """points: each is a dot; spread: half the length of its error bar; notes: shown under the pointer, by default
        its coordinates."""
        style = {"linestyle": "--" if dashed else "-", "marker": "o" if points else None, "markersize": 5}
        self._axes.plot(xs, ys, color=colour, label=printable(name), zorder=2.5, clip_on=False, **style)
        if spread is not None:
            self._axes.errorbar(xs, ys, spread, fmt="none", ecolor=colour, capsize=2.5, elinewidth=1)
        of = f"{name}, " if name else ""
        notes = notes or [f"{of}{self._x_label} {number(x)}: {number(y)}" for x, y in zip(xs, ys)]
        self._notes += [(x, y, 4, note) for x, y, note in zip(xs, ys, notes)]
        return self

    @_styled
    def level(self, y: float, name: str, colour: str = GREY) -> Self:
        self._axes.axhline(y, color=colour, linestyle="--", linewidth=1.1, zorder=1.5, label=printable(name))
        return self

    @_styled
    def mark(self, x: float, y: float, name: str) -> Self:
        right = x > sum(self._axes.get_xlim()) / 2
        self._axes.plot([x], [y], "o", color=ORANGE, markersize=7, markeredgecolor="white", zorder=3)
        place = {"textcoords": "offset points", "ha": "right" if right else "left"}
        self._axes.annotate(printable(name), (x, y), (-6 if right else 6, 6), color=ORANGE, **place)
        return self

    @_styled
    def cloud(
        self, points: Sequence[tuple[float, float, float, str]], name: str, colour: str = BLUE, marker: str = "o"
    ) -> Self:
        """Points (x, y, radius in points, note)."""
        xs, ys, radii, _ = zip(*points)
        look = {"s": [4 * radius**2 for radius in radii], "alpha": 0.7, "linewidths": 0}  # its sizes are areas
        self._axes.scatter(xs, ys, color=colour, marker=marker, label=printable(name), **look)
        self._notes += points
        return self

    @_styled
    def ellipses(
        self, rows: Sequence[tuple[float, float, float, float, float, str]], name: str, colour: str = BLUE
    ) -> Self:
        """Ellipses (x, y, half axis, other half axis, angle in radians, note)."""
        look = {"facecolor": to_rgba(colour, min(0.3, 2 / len(rows))), "edgecolor": to_rgba(colour, 0.6)}
        for x, y, a, b, angle, _ in rows:
            self._axes.add_patch(Ellipse((x, y), 2 * a, 2 * b, angle=math.degrees(angle), linewidth=0.8, **look))
        self._axes.autoscale_view()
        self._axes.set_aspect("equal", adjustable="datalim")
        return self.cloud([(x, y, 2, note) for x, y, _, _, _, note in rows], name, colour)

    @_styled
    def bars(self, counts: Sequence[int], things: str) -> Self:
        """Bars at x = 1, 2, ..., len(counts); `things` names what is counted."""
        ks = range(1, len(counts) + 1)
        self._axes.bar(ks, counts, 0.8, color=BLUE)
        for axis in (self._axes.xaxis, self._axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        self._notes += [(k, n / 2, 4, f"{self._x_label} {k}: {number(n)} {things}") for k, n in zip(ks, counts) if n]
        return self

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished, axes = True, self._axes
        if axes.lines:
            if all(float(x).is_integer() for line in axes.lines for x in line.get_xdata()):
                axes.xaxis.get_major_locator().set_params(integer=True)
            axes.margins(x=0.03, y=0.08)
            if axes.dataLim.ymin >= 0:
                axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
            if "%" in self._y_label:  # shares end at 100
                axes.set_ylim(top=min(100.0, axes.get_ylim()[1]))
        if names := axes.get_legend_handles_labels()[1]:
            columns = next(n for n in (4, 3, 2, 1) if n == 1 or _legend_width(names, n) <= LEGEND)
            legend = self._figure.legend(loc="outside upper right", ncols=columns)
            for handle in legend.legend_handles:
                if hasattr(handle, "set_sizes"):
                    handle.set_sizes([30])
            self._figure.set_figheight(HEIGHT + 0.2 * (math.ceil(len(names) / columns) - 1))

    @_styled
    def save(self, path: Path, format: str, generator: str = "") -> None:
        self._finish()
        key = "Software" if format == "png" else "Creator"
        self._figure.savefig(path, format=format, dpi=200, metadata={key: generator})

    @_styled
    def svg(self) -> str:
        """An <svg> element for a page, with the notes of its points."""
        self._finish()
        buffer = io.StringIO()
        self._figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        width, height = self._figure.get_size_inches() * 72
        # A style would hold for the whole page, and HTML has no namespaces. Text stands in comments, escaped.
        inside = re.sub(r"<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL).partition("<svg")[2].partition(">")[2]
        inside = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|</svg>", "", inside, flags=re.DOTALL)
        circles = []
        for x, y, radius, note in self._notes:
            left, up = self._axes.transData.transform((x, y))
            place = f'cx="{left:.1f}" cy="{height - up:.1f}" r="{max(radius, 3):.1f}"'
            circles.append(f"<circle {place}><title>{escape(printable(note))}</title></circle>")
        title = escape(printable(f"{self._y_label} against {self._x_label}"))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" class="chart" role="img" '
            f'stroke-linejoin="round" aria-label="{title}">'
            f'{inside.replace("xlink:href", "href")}<g fill="transparent">{"".join(circles)}</g></svg>'
        )
