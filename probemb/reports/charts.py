"""Small charts as SVG text: lines, points and bars, drawn to one style. No plotting library, so a page stays light."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 500, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 44
LABELS = 104  # pixels to the right of the plot for the names of levels
INK, SOFT, GRID = "#1f2733", "#5d6875", "#e3e7ec"
BLUE, ORANGE, GREEN, GREY = "#2a6fb0", "#b8560f", "#2f7d4f", "#8a94a0"


def printable(text: object) -> str:
    """Text of unknown origin: what cannot be printed (controls, half characters, changes of writing direction) is
    replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def escape(text: object) -> str:
    """`printable` text for HTML: markup is quoted."""
    return html.escape(printable(text))


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    y: float
    label: str
    colour: str = GREY


@dataclass(frozen=True)
class Frame:
    """Axes: ranges, and what stands beside them. Values are mapped to pixels by `x` and `y`."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_label: str
    y_label: str
    x_ticks: Sequence[float] = ()
    right: float = WIDTH - RIGHT  # pixel of the right end

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1) * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 12, 0.25, 1.3e-05."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}"
    return f"{value:.4g}"


def _svg(frame: Frame, y_ticks: Sequence[float], parts: list[str], title: str) -> str:
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="chart">',
        f'<text x="{LEFT - 40}" y="16" class="axis">{escape(frame.y_label)}</text>',
        f'<text x="{(LEFT + frame.right) / 2}" y="{HEIGHT - 8}" class="axis" text-anchor="middle">'
        f"{escape(frame.x_label)}</text>",
    ]
    for tick in y_ticks:
        y = frame.y(tick)
        lines.append(f'<line x1="{LEFT}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        lines.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" class="tick" text-anchor="end">{number(tick)}</text>')
    for tick in frame.x_ticks:
        x = frame.x(tick)
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" class="tick" text-anchor="middle">{number(tick)}</text>'
        )
    base = HEIGHT - BOTTOM
    lines.append(f'<line x1="{LEFT}" x2="{frame.right}" y1="{base}" y2="{base}" stroke="{SOFT}"/>')
    return "".join([*lines, *parts, "</svg>"])


def line_chart(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    mark: int | None = None,
    mark_label: str = "",
    points: bool = False,
    notes: Sequence[str] | None = None,
) -> str:
    """One line over x, with levels to compare with.

    Args:
        mark: index of one point to point out, with `mark_label` beside it.
        points: draw every point as a dot; notes: what each says under the pointer.
    """
    values = [*ys, *(level.y for level in levels)]
    spread = (max(values) - min(values)) or abs(max(values)) or 1.0
    low = min(values) - 0.08 * spread
    y_ticks = nice_ticks(max(0.0, low) if min(values) >= 0 else low, max(values) + 0.08 * spread)
    inner = [t for t in nice_ticks(min(xs), max(xs), 6) if min(xs) <= t <= max(xs)]
    if not points and xs[0] not in inner:
        inner = [xs[0], *(t for t in inner if t - xs[0] > 0.06 * (xs[-1] - xs[0]))]
    pad = 0.03 * (max(xs) - min(xs)) if points else 0.0
    right = WIDTH - (LABELS if levels else RIGHT)
    frame = Frame((min(xs) - pad, max(xs) + pad), (y_ticks[0], y_ticks[-1]), x_label, y_label, inner, right)
    parts = []
    label_y = float("inf")
    for level in sorted(levels, key=lambda level: level.y):  # from the bottom up: pixels count downwards
        y = frame.y(level.y)
        label_y = min(y + 4, label_y - 15)
        parts.append(
            f'<line x1="{LEFT}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{level.colour}" '
            f'stroke-width="1.4" stroke-dasharray="5 4"/>'
            f'<text x="{frame.right + 6}" y="{label_y:.1f}" class="note" fill="{level.colour}">'
            f"{escape(level.label)}</text>"
        )
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, ys))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2.2" stroke-linejoin="round"/>')
    notes = notes or [f"{x_label} {number(x)}: {number(y)}" for x, y in zip(xs, ys)]
    radius = 4 if points else 5
    for x, y, note in zip(xs, ys, notes):
        fill = BLUE if points else "transparent"
        parts.append(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}" fill="{fill}">'
            f"<title>{escape(note)}</title></circle>"
        )
    if mark is not None:
        x, y = frame.x(xs[mark]), frame.y(ys[mark])
        end = x > (LEFT + right) / 2
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ORANGE}" stroke="#fff" stroke-width="1.5"/>'
            f'<text x="{x + (-9 if end else 9):.1f}" y="{y - 9:.1f}" class="note" fill="{ORANGE}" '
            f'text-anchor="{"end" if end else "start"}">{escape(mark_label)}</text>'
        )
    return _svg(frame, y_ticks, parts, f"{y_label} against {x_label}")


@dataclass(frozen=True)
class Curve:
    """One of several lines; a name is shown at its end."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str = BLUE
    dashed: bool = False


def curves_chart(curves: Sequence[Curve], *, x_label: str, y_label: str) -> str:
    """Several lines over x, each named at its right end, without a legend to look things up in."""
    xs = [x for curve in curves for x in curve.xs]
    ys = [y for curve in curves for y in curve.ys]
    spread = (max(ys) - min(ys)) or abs(max(ys)) or 1.0
    low = min(ys) - 0.08 * spread
    y_ticks = nice_ticks(max(0.0, low) if min(ys) >= 0 else low, max(ys) + 0.08 * spread)
    x_ticks = [t for t in nice_ticks(min(xs), max(xs), 6) if min(xs) <= t <= max(xs) + 1e-12]
    frame = Frame((min(xs), max(xs)), (y_ticks[0], y_ticks[-1]), x_label, y_label, x_ticks, WIDTH - LABELS)
    parts = []
    label_y = float("inf")
    for curve in sorted(curves, key=lambda curve: curve.ys[-1]):  # names from the bottom up, none over another
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(curve.xs, curve.ys))
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        label_y = min(frame.y(curve.ys[-1]) + 4, label_y - 15)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="2" stroke-linejoin="round"'
            f'{dash}/><text x="{frame.right + 6}" y="{label_y:.1f}" class="note" fill="{curve.colour}">'
            f"{escape(curve.name)}</text>"
        )
        for x, y in zip(curve.xs, curve.ys):
            parts.append(
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="5" fill="transparent"><title>'
                f"{escape(f'{curve.name}, {x_label} {number(x)}: {number(y)}')}</title></circle>"
            )
    return _svg(frame, y_ticks, parts, f"{y_label} against {x_label}")


@dataclass(frozen=True)
class Cloud:
    """Points of one kind: (x, y, radius in pixels, note)."""

    name: str
    points: Sequence[tuple[float, float, float, str]]
    colour: str = BLUE


def scatter_chart(clouds: Sequence[Cloud], *, x_label: str, y_label: str) -> str:
    """Points in a plane, each with a note under the pointer; kinds are named in a line above."""
    xs = [point[0] for cloud in clouds for point in cloud.points]
    ys = [point[1] for cloud in clouds for point in cloud.points]
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs), 6), nice_ticks(min(ys), max(ys), 5)
    frame = Frame((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]), x_label, y_label, x_ticks)
    parts = []
    for i, cloud in enumerate(clouds):
        x = WIDTH - RIGHT - 90 * (len(clouds) - i)
        parts.append(
            f'<circle cx="{x}" cy="12" r="5" fill="{cloud.colour}" fill-opacity="0.6"/>'
            f'<text x="{x + 9}" y="16" class="tick">{escape(cloud.name)}</text>'
        )
        for px, py, radius, note in cloud.points:
            parts.append(
                f'<circle cx="{frame.x(px):.1f}" cy="{frame.y(py):.1f}" r="{radius:.1f}" fill="{cloud.colour}" '
                f'fill-opacity="0.45"><title>{escape(note)}</title></circle>'
            )
    return _svg(frame, y_ticks, parts, f"{y_label} against {x_label}")


def bar_chart(counts: Sequence[float], *, x_label: str, y_label: str, what: str) -> str:
    """Bars for x = 1, 2, ..., len(counts); `what` names the things counted, for the note under the pointer."""
    n = len(counts)
    y_ticks = [t for t in nice_ticks(0, max([*counts, 1]), 4) if float(t).is_integer()]
    x_ticks = list(range(1, n + 1)) if n <= 12 else [1, *(t for t in range(10, n + 1, 10 if n <= 100 else n // 8))]
    frame = Frame((0.4, n + 0.6), (0, y_ticks[-1]), x_label, y_label, x_ticks)
    width = max(1.0, (frame.x(1) - frame.x(0)) * 0.8)
    parts = []
    for k, count in enumerate(counts, 1):
        if not count:
            continue
        y = frame.y(count)
        parts.append(
            f'<rect x="{frame.x(k) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{BLUE}"><title>{escape(x_label)} {k}: {number(count)} '
            f"{escape(what)}</title></rect>"
        )
    return _svg(frame, y_ticks, parts, f"{y_label} against {x_label}")
