"""Figures: what stands in the SVG and in the files, and hostile names."""

import runpy
import warnings
from xml.etree import ElementTree

import matplotlib
import pytest

from probemb.reports import figures
from probemb.reports.figures import GREEN, Chart

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script> $\\frac{1}$ \x00 \u202e \ud800 ]]> -->"


def curve() -> Chart:
    chart = Chart("curve", x_label="K & <x>", y_label="%")
    chart.line([1, 2, 3], [0.0, 10.0, 5.0]).level(5, "all", GREEN).level(5, "single").mark(2, 10.0, "K = 2")
    return chart


def test_points_stand_where_they_belong_and_letters_are_found_by_html():
    root = ElementTree.fromstring(svg := curve().svg())
    notes = {circle[0].text: circle for circle in root.iter(f"{SVG}circle")}
    assert list(notes) == ["K & <x> 1: 0", "K & <x> 2: 10", "K & <x> 3: 5"]
    low, high, middle = (float(circle.get("cy")) for circle in notes.values())
    assert low > middle > high  # pixels count downwards
    assert middle == pytest.approx((low + high) / 2, abs=0.2)
    xs = [float(circle.get("cx")) for circle in notes.values()]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    ids, uses = {element.get("id") for element in root.iter()}, list(root.iter(f"{SVG}use"))
    assert len(uses) > 20
    assert all(use.get("href", "").removeprefix("#") in ids for use in uses)
    assert "xlink" not in svg
    assert "<style" not in svg  # of one figure, which would hold for the page


def test_the_settings_of_matplotlib_stay():
    with matplotlib.rc_context({"font.size": 33, "axes.grid": False}):
        runpy.run_path(figures.__file__)
        curve().svg()
        assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]) == (33, False)


def test_hostile_text_stays_text():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the font does not have
        chart = Chart("hostile", x_label=HOSTILE, y_label=HOSTILE).line([0, 1], [0, 1], HOSTILE, notes=[HOSTILE] * 2)
        chart.level(0.5, HOSTILE).mark(0, 0, HOSTILE).cloud([(0, 0, 3, HOSTILE)], HOSTILE)
        svg = chart.svg()
    assert "<script" not in svg
    root = ElementTree.fromstring(svg)
    shown = "<script>alert(1)</script> $\\frac{1}$ \ufffd \ufffd \ufffd ]]> -->"
    assert [title.text for title in root.iter(f"{SVG}title")] == [shown] * 3
    assert root.get("aria-label") == f"{shown} against {shown}"
