"""`python -m zeroshot.analyses NAME`: the files that each analysis writes."""

import pytest
import torch

from probemb.data.boxes import crop_triplets, find_phrases
from probemb.data.captions.find import find_captions
from tests.world import jpeg
from tools.make_scenes.command import Plan, make
from tools.make_scenes.world import scene
from zeroshot.analyses import main
from zeroshot.evaluations.analyses import SHARES, mix

CHAINS = ["shape => circle => red circle => a red circle on white", "thing => square => blue square => one <b>, left"]


union, algebra, ellipses, continuity, hierarchy = (
    (lambda argv, name=name: main([name, *argv]))
    for name in ("union", "set-algebra", "ellipses", "continuity", "hierarchy")
)


def test_union(run, run_folder, boxed_scenes):
    options = ("--workers", 0, "--areas", "[0.9, 0.4]", "--rankings", "csd,mean,kl")
    crops = run(union, run_folder, boxed_scenes / "visual_genome", *options)
    data = find_phrases(boxed_scenes / "visual_genome")
    expected = {area: n for area in (0.4, 0.9) if (n := len(crop_triplets(data, area)))}
    assert {row["area"]: row["triplets"] for row in crops.json["areas"]} == expected
    for row in crops.json["areas"]:
        assert [one["ranking"] for one in row["selection"]] == ["csd", "mean", "kl"]
        assert set(row["uncertainty"]["log-det"]) >= {"images", "captions"}


def test_set_algebra(run, run_folder, boxed_scenes):
    options = ("--inputs", 8, "--no-split")
    result = run(algebra, run_folder, boxed_scenes / "val", *options)
    assert result.json["inputs"] == 8
    assert set(result.json["mixing"]) == {"cutmix", "mixup"}
    for rows in result.json["erasing"].values():
        assert [row["share"] for row in rows] == list(SHARES)
        assert all(0 <= row[key] <= 1 for row in rows for key in ("wider", "lies_in", "covers", "covered"))


def test_mixes():
    one, two = torch.zeros(2, 5, 3), torch.ones(2, 5, 3)
    assert mix(one, two, "cutmix")[:, :, 0].tolist() == [[0, 1, 0, 1, 0]] * 2
    one, two = torch.zeros(2, 3, 4, 6), torch.ones(2, 3, 4, 6)
    assert mix(one, two, "cutmix").sum((0, 1, 2)).tolist() == [0, 0, 0, 24, 24, 24]
    assert (mix(one, two, "mixup") == 0.5).all()
    assert not one.any()


def test_ellipses_of_classes_with_a_generic_caption(run, run_folder, tmp_path):
    make(Plan(train=0, val=0, classes_images=0, size=32, captions=3, class_captions=64), tmp_path / "world", workers=1)
    options = ("--groups", 4, "--per-group", 2, "--generic", "a shape", "--split", "train")
    result = run(ellipses, run_folder, tmp_path / "world" / "by-class", *options)
    found = result.json
    assert len(found["groups"]) == 4
    assert set(found["images"]["groups"]) == set(found["captions"]["groups"]) == set(found["groups"])
    assert len(found["images"]["centre"]) <= 8
    assert len(found["captions"]["labels"]) == len(found["captions"]["angle"])
    assert 0 <= found["generic"]["wider_than_captions"] <= 1


def test_continuity(run, run_folder, captioned):
    result = run(continuity, run_folder, captioned, "--walks", 4, "--shown", 2, "--no-split")
    walks, near = result.json["walks"], result.json["neighbours"]
    assert (walks["walks"], len(walks["to_start"])) == (4, 7)
    assert walks["cosine"][0] == pytest.approx(1, abs=1e-4)
    assert 0 < near["likeness"] <= near["most"] <= 1
    assert result.page.count["img"] == 2 * 7 + 2 * 6


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


def test_hierarchy_measures_each_walk(table, run, run_folder):
    data = find_captions(table)
    assert data.captions[1] == ["thing", "square", "blue square", "one <b>, left"]
    assert data.image_ids[5] == "COCO_5.jpg"
    result = run(hierarchy, run_folder, table)
    found = result.json
    assert (found["images"], found["captions"], found["distinct"]) == (6, 24, 8)
    assert [row["walk"] for row in found["rows"]] == ["walk", "walk-inclusion", "radius"]
    assert all(0 <= row[key] <= 1 for row in found["rows"] for key in ("precision", "recall", "any"))
    assert len(found["uncertainty"]) == 4
