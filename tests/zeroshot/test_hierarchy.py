"""Captions from general to exact: the table, the command, and wrong data."""

import json

import pytest

from probemb.data.captions.find import find_captions
from probemb.data.scenes import scene
from probemb.errors import UserError
from tests.world import jpeg
from zeroshot.hierarchy import main

CHAINS = ["shape => circle => red circle => a red circle on white", "thing => square => blue square => one <b>, left"]


@pytest.fixture
def table(tmp_path):
    """HierarCaps' table with six images."""
    (tmp_path / "images").mkdir()
    rows = ["id,captions,image_url"]
    for i in range(6):
        (tmp_path / "images" / f"COCO_{i}.jpg").write_bytes(jpeg(scene("h", i)))
        rows.append(f'{i},"{CHAINS[i % 2]}",http://images.example/val2014/COCO_{i}.jpg')
    (tmp_path / "chains.csv").write_text("\n".join(rows))
    return tmp_path / "chains.csv"


def test_the_command_measures_each_walk(table, run_folder, tmp_path, capsys):
    data = find_captions(table)
    assert data.captions[1] == ["thing", "square", "blue square", "one <b>, left"]
    assert data.image_ids[5] == "COCO_5.jpg"
    assert main(["--model", str(run_folder), "--data", str(table), "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert (found["images"], found["captions"], found["distinct"]) == (6, 24, 8)
    assert [row["walk"] for row in found["rows"]] == ["walk", "walk-inclusion", "radius"]
    assert all(0 <= row[key] <= 1 for row in found["rows"] for key in ("precision", "recall", "any"))
    assert len(found["uncertainty"]) == 4
    assert set(found["level_correlation"]) == {"radius", "certainty"}
    assert "Kendall's tau with the level" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("9,a => b,http://images.example/COCO_0.jpg", "2 to 4 captions"),
        ("9,a => b => c => d,http://images.example/..", "no name of an image, in row 7"),
        ("9", "in row 7"),
        ("9,a => b => c => d,http://images.example/COCO_8.jpg", "1 of the 7"),
    ],
)
def test_wrong_tables(row, problem, table, run_folder, tmp_path):
    if "2 to 4" in problem:
        table.write_text(table.read_text().replace("COCO_0.jpg", "COCO_7.jpg"))
        (table.parent / "images" / "COCO_7.jpg").write_bytes((table.parent / "images" / "COCO_0.jpg").read_bytes())
    table.write_text(f"{table.read_text()}\n{row}")
    with pytest.raises(UserError, match=problem):
        main(["--model", str(run_folder), "--data", str(table), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
