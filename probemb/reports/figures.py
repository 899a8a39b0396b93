"""Figures of reports, drawn with matplotlib: SVG inside a page, and PDF and PNG files for papers.

Nothing here touches pyplot or the user's matplotlib settings. Letters become outlines in SVG, so that a page looks the
same everywhere; the SVG takes its colours from the page, light or dark. The colours suit colour-blind readers, and
names are printed beside lines.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from xml.etree import ElementTree

from matplotlib import patheffects
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from probemb.reports.text import number, printable

BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0068a8", "#b8560f", "#00785a", "#8f4a86", "#6a7480", "#1f2733"
GOLD, RED, TEAL, PINK = "#8a6d00", "#c02f3c", "#2b8c8c", "#c05a9a"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GOLD, TEAL, PINK, GREY, INK)
SOFT, GRID, PAPER = "#5d6875", "#e3e7ec", "#ffffff"
WIDTH, HEIGHT = 5.2, 3.0  # inches, of a figure without long names
_VARIABLES = {  # colours of a page's style sheet
    BLUE: "blue", ORANGE: "orange", GREEN: "green", PURPLE: "purple", GREY: "grey", GOLD: "gold", INK: "ink",
    SOFT: "soft", GRID: "grid", PAPER: "paper",
}  # fmt: skip
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.handletextpad": 0.3,
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
_NAMESPACE = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", _NAMESPACE)


def _styled(method: Callable) -> Callable:
    """Run with this module's style over matplotlib's defaults."""

    @wraps(method)
    def inside(*args, **kwargs):
        with context(["default", _STYLE]):
            return method(*args, **kwargs)

    return inside


def apart(at: Sequence[float], distance: float) -> list[float]:
    """Ascending places moved so that no two are closer than `distance`; those in each other's way move together."""
    groups: list[list[float]] = []  # [the lowest one's place, how many, sum of the lowest places that they want]
    for place in at:
        groups.append([place, 1, place])
        while len(groups) > 1 and groups[-1][0] < groups[-2][0] + groups[-2][1] * distance:
            _, n, wanted = groups.pop()
            _, before, also = groups[-1]
            total = also + wanted - n * before * distance
            groups[-1] = [total / (before + n), before + n, total]
    return [low + k * distance for low, n, _ in groups for k in range(int(n))]


class Chart:
    """One figure with one pair of axes.

    Args:
        name: of its files, unique within a page.
        x_label, y_label: the axes' quantities, with units.
    """

    @_styled
    def __init__(self, name: str, *, x_label: str, y_label: str):
        self.name = name
        self.title = f"{y_label} against {x_label}"
        self._x_label, self._y_label = x_label, y_label
        self._figure = Figure(figsize=(WIDTH, HEIGHT), dpi=72, layout="constrained")  # at 72 a pixel is a point
        self._axes = self._figure.add_subplot()
        self._axes.set_xlabel(printable(x_label))
        self._axes.set_ylabel(printable(y_label))
        self._axes.xaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10)))
        self._axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
        self._ends: list[tuple[float, str, str]] = []  # (y, name, colour) of lines that are named at their right end
        self._notes: list[tuple[float, float, float, str]] = []  # (x, y, radius, text) under the pointer
        self._finished = False

    @_styled
    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        name: str = "",
        colour: str = BLUE,
        *,
        dashed: bool = False,
        points: bool = False,
        spread: Sequence[float] | None = None,
        notes: Sequence[str] | None = None,
    ) -> Chart:
        """A line, named at its right end.

        Args:
            points: draw every point as a dot.
            spread: half the length of an error bar at each point.
            notes: text of each point under the pointer; by default its coordinates.
        """
        style, marker = "--" if dashed else "-", "o" if points else None
        self._axes.plot(xs, ys, style, color=colour, marker=marker, markersize=5, clip_on=False, zorder=2.5)
        if spread is not None:
            self._axes.errorbar(xs, ys, spread, fmt="none", ecolor=colour, capsize=2.5, elinewidth=1)
        if name:
            self._ends.append((ys[-1], name, colour))
        of = f"{name}, " if name else ""
        notes = notes or [f"{of}{self._x_label} {number(x)}: {number(y)}" for x, y in zip(xs, ys)]
        self._notes += [(x, y, 4, note) for x, y, note in zip(xs, ys, notes)]
        return self

    def bins(self, bins: dict, things: str) -> Chart:
        """A point with a standard error for every bin of `metrics.uncertainty.Bins` (as a dict): accuracy in percent
        against uncertainty.
        """
        ys = [100 * y for y in bins["accuracy"]]
        errors = [math.nan if se is None else 100 * se for se in bins["accuracy_se"]]
        notes = [
            f"{count} {things}, mean uncertainty {number(x)}: {y:.2f}{'' if math.isnan(se) else f' ± {se:.2f}'} %"
            for count, x, y, se in zip(bins["counts"], bins["uncertainty"], ys, errors)
        ]
        return self.line(bins["uncertainty"], ys, points=True, spread=errors, notes=notes)

    @_styled
    def level(self, y: float, name: str, colour: str = GREY) -> Chart:
        """A horizontal line for comparison."""
        self._axes.axhline(y, color=colour, linestyle="--", linewidth=1.1, zorder=1.5)
        self._ends.append((y, name, colour))
        return self

    @_styled
    def mark(self, x: float, y: float, name: str) -> Chart:
        """Highlight one point."""
        self._axes.plot([x], [y], "o", color=ORANGE, markersize=7, markeredgecolor=PAPER, zorder=3)
        low, high = self._axes.get_xlim()
        right = x > (low + high) / 2
        self._axes.annotate(
            printable(name), (x, y), (-6 if right else 6, 6), textcoords="offset points", color=ORANGE,
            ha="right" if right else "left", path_effects=[patheffects.withStroke(linewidth=2.5, foreground=PAPER)],
        )  # fmt: skip
        return self

    @_styled
    def cloud(
        self, points: Sequence[tuple[float, float, float, str]], name: str, colour: str = BLUE, marker: str = "o"
    ) -> Chart:
        """Points (x, y, radius in points, note) of one kind, named above the axes."""
        xs, ys, radii, _ = zip(*points)
        areas = [4 * radius**2 for radius in radii]  # matplotlib's sizes are areas
        alpha = 0.5 if len(points) > 50 else 0.85
        self._axes.scatter(xs, ys, areas, color=colour, marker=marker, alpha=alpha, linewidths=0, label=printable(name))
        self._notes += points
        return self

    @_styled
    def ellipses(
        self, rows: Sequence[tuple[float, float, float, float, float, str]], name: str, colour: str = BLUE,
        *, dashed: bool = False, wide: bool = False,
    ) -> Chart:  # fmt: skip
        """Ellipses (x, y, half axis, other half axis, angle in radians, note) of one kind, named above the axes.

        Args:
            wide: a heavy outline without a filling.
        """
        fill = 0.0 if wide else min(0.3, 2 / len(rows))  # many lie over each other
        for x, y, a, b, angle, _ in rows:
            self._axes.add_patch(
                Ellipse(
                    (x, y), 2 * a, 2 * b, angle=math.degrees(angle), facecolor=to_rgba(colour, fill),
                    edgecolor=to_rgba(colour, 1.0 if wide else 0.6), linewidth=1.6 if wide else 0.8,
                    linestyle="--" if dashed else "-",
                )
            )  # fmt: skip
            reach = math.hypot(a, b)
            self._axes.update_datalim([(x - reach, y - reach), (x + reach, y + reach)])
        self._axes.autoscale_view()
        self._axes.set_aspect("equal", adjustable="datalim")
        return self.cloud([(x, y, 2, note) for x, y, _, _, _, note in rows], name, colour)

    @_styled
    def bars(self, counts: Sequence[int], things: str) -> Chart:
        """Bars at x = 1, 2, ..., len(counts), with the standard errors of multinomial counts; `things` names what is
        counted.
        """
        ks, total = range(1, len(counts) + 1), sum(counts)
        errors = [math.sqrt(n * (1 - n / total)) if n else 0.0 for n in counts]
        self._axes.bar(ks, counts, 0.8, color=BLUE)
        shown = [k - 1 for k in ks if errors[k - 1]]
        self._axes.errorbar(
            [k + 1 for k in shown], [counts[k] for k in shown], [errors[k] for k in shown],
            fmt="none", ecolor=INK, capsize=2, elinewidth=1,
        )  # fmt: skip
        self._axes.set_xlim(0.4, len(counts) + 0.6)
        self._axes.set_ylim(0, max([n + error for n, error in zip(counts, errors)] + [1]) * 1.05)
        for axis in (self._axes.xaxis, self._axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        self._notes += [
            (k, n / 2, 4, f"{self._x_label} {k}: {number(n)} ± {number(error)} {things}")
            for k, n, error in zip(ks, counts, errors)
            if n
        ]
        return self

    def _finish(self) -> None:
        """Set ranges and legend, and write the names at the ends of lines without overlap."""
        if self._finished:
            return
        self._finished = True
        axes = self._axes
        if axes.collections and axes.get_legend_handles_labels()[1]:
            self._add_legend()
        if axes.lines:
            if all(float(x).is_integer() for line in axes.lines for x in line.get_xdata()):
                axes.xaxis.get_major_locator().set_params(integer=True)
            axes.margins(x=0.03, y=0.08)
            if axes.dataLim.ymin >= 0:
                axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
            if "%" in self._x_label:  # shares end at 100
                axes.set_xlim(right=min(100.0, axes.get_xlim()[1]))
            if "%" in self._y_label:
                axes.set_ylim(top=min(100.0, axes.get_ylim()[1]))
        longest = max((len(name) for _, name, _ in self._ends), default=0)
        self._figure.set_figwidth(WIDTH + max(0, longest - 18) * 0.075)  # inches a letter, so that the axes stay wide
        self._figure.draw_without_rendering()  # the layout's heights; names at the right do not change them
        ends = sorted(self._ends)
        at = [axes.transData.transform((0, y))[1] for y, _, _ in ends]
        for (y, name, colour), own, free in zip(ends, at, apart(at, 12)):
            axes.annotate(
                printable(name), (1, y), (5, free - own), xycoords=("axes fraction", "data"),
                textcoords="offset points", color=colour, va="center", annotation_clip=False,
            )  # fmt: skip

    def _add_legend(self) -> None:
        """Above the axes, in as many columns as fit; further rows make the figure higher."""
        for columns in (4, 3, 2, 1):
            legend = self._figure.legend(loc="outside upper right", ncols=columns)
            for handle in legend.legend_handles:
                handle.set_sizes([30])
            self._figure.draw_without_rendering()
            if legend.get_window_extent().x0 >= 0 or columns == 1:
                break
            legend.remove()
        rows = -(-len(legend.legend_handles) // columns)
        self._figure.set_figheight(HEIGHT + 0.2 * (rows - 1))

    @_styled
    def save(self, path: Path, format: str, generator: str = "") -> None:
        """Write "pdf", "png" (200 dots an inch) or "svg", on white."""
        self._finish()
        key = {"png": "Software", "pdf": "Creator", "svg": "Creator"}[format]
        self._figure.savefig(path, format=format, dpi=200, metadata={key: generator})

    @_styled
    def svg(self) -> str:
        """An <svg> element for a page: colours are variables of the page, and points have their notes."""
        self._finish()
        buffer = io.BytesIO()
        self._figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        root = ElementTree.fromstring(buffer.getvalue())
        width, height = self._figure.get_size_inches() * 72
        for parent in list(root.iter()):
            for child in list(parent):
                if child.tag.endswith(("metadata", "style")):  # a style would hold for the whole page
                    parent.remove(child)
        for element in root.iter():
            for key, value in list(element.attrib.items()):
                del element.attrib[key]
                element.set(key.replace("{http://www.w3.org/1999/xlink}", ""), self._adapt(key, value))
        layer = ElementTree.SubElement(root, f"{{{_NAMESPACE}}}g", {"fill": "transparent"})
        for x, y, radius, note in self._notes:
            left, up = self._axes.transData.transform((x, y))
            place = {"cx": f"{left:.1f}", "cy": f"{height - up:.1f}", "r": f"{max(radius, 3):.1f}"}
            circle = ElementTree.SubElement(layer, f"{{{_NAMESPACE}}}circle", place)
            ElementTree.SubElement(circle, f"{{{_NAMESPACE}}}title").text = printable(note)
        root.attrib.clear()
        root.attrib.update({"viewBox": f"0 0 {width:g} {height:g}", "class": "chart", "role": "img"})
        root.attrib.update({"stroke-linejoin": "round", "aria-label": printable(self.title)})
        return ElementTree.tostring(root, encoding="unicode")

    def _adapt(self, key: str, value: str) -> str:
        """The value of an attribute with names unique in the page and the page's colours."""
        if key == "id":
            return f"{self.name}-{value}"
        if key.endswith("href"):
            return value.replace("#", f"#{self.name}-")
        if key == "style":
            for colour, variable in _VARIABLES.items():
                value = value.replace(colour, f"var(--{variable})")
            return value
        return value.replace("url(#", f"url(#{self.name}-")
