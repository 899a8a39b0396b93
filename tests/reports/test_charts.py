"""Charts as SVG, and text made safe."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from probemb.reports.charts import (
    GREY,
    Cloud,
    Curve,
    Level,
    bar_chart,
    curves_chart,
    escape,
    line_chart,
    nice_ticks,
    scatter_chart,
)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.134, 0.135), (-3, 70_000), (5, 5), (0, 0)])
def test_ticks_are_round_and_hold_the_range(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 9
    steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


def test_charts_are_well_formed_and_stay_inside(capsys):
    for chart in (
        line_chart(
            [1, 2, 3], [0.0, 10.0, 5.0], x_label="K & <x>", y_label="%", levels=[Level(5, "all"), Level(5, "b")]
        ),
        line_chart([2.5, 2.5], [7.0, 7.0], x_label="u", y_label="%", points=True, mark=1, mark_label="here"),
        bar_chart([0, 3, 1], x_label="K", y_label="classes", what="classes"),
        bar_chart([0] * 80, x_label="K", y_label="classes", what="classes"),
        curves_chart(
            [Curve("a < b", [0, 50, 95], [1.0, 2.0, 3.0]), Curve("c", [0, 95], [3.0, 3.0], GREY, dashed=True)],
            x_label="refused, %",
            y_label="%",
        ),
        curves_chart([Curve("flat", [0, 1], [0.0, 0.0])], x_label="x", y_label="y"),
        scatter_chart(
            [Cloud("a", [(0.1, -3.0, 4, "<b>")]), Cloud("b", [(2.0, 5.0, 8, "&"), (0.3, 0.0, 3, "")])],
            x_label="x",
            y_label="y",
        ),
    ):
        root = ElementTree.fromstring(chart)
        _, _, width, height = map(float, root.get("viewBox").split())
        for element in root.iter():
            for name, limit in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("cx", width),
                ("y", height),
                ("cy", height),
            ):
                if element.get(name) is not None:
                    assert 0 <= float(element.get(name)) <= limit
            assert float(element.get("height", 0)) >= 0


def test_escape_leaves_nothing_active():
    assert escape('<a href="x">&') == "&lt;a href=&quot;x&quot;&gt;&amp;"
    assert escape("a\x00b\u202ec\ud800") == "a\ufffdb\ufffdc\ufffd"
