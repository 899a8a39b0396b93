"""tools.write_crops: crops and their phrases against plain loops, read back as data to finetune on."""

import json

import pytest

from probemb.cli.command import run_command
from probemb.data.boxes import find_phrases
from probemb.data.boxes.geometry import enclosing
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from tests.data.boxes.test_visual_genome import region, write
from tools.make_scenes import Plan, make
from tools.write_crops import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("cropped") / "scenes"
    make(Plan(train=0, val=6, classes_images=0, size=48, boxes=True), out, workers=1)
    return out / "entities"


def overlap(a, b):
    """IoU of two boxes with whole corners, by counting pixels."""
    first, second = ({(x, y) for x in range(p[0], p[2]) for y in range(p[1], p[3])} for p in (a, b))
    return len(first & second) / len(first | second)


def test_a_crop_has_the_phrases_whose_boxes_it_overlaps_by_070(scenes, tmp_path):
    data = find_phrases(scenes, "val")
    proposals = {}
    for phrase in data.phrases:  # each box whole, cut by a pixel, and far too large
        left, top, right, bottom = map(int, enclosing(phrase.boxes))
        some = proposals.setdefault(data.image_ids[phrase.image], [[0, 0, 48, 48]])
        some += [[left, top, right, bottom], [left, top, right - 1, bottom], [left, top, 48, 48]]
    (tmp_path / "boxes.json").write_text(json.dumps(proposals))
    options = ["--data", str(scenes), "--proposals", str(tmp_path / "boxes.json"), "--out", str(tmp_path / "pairs")]
    assert main([*options, "--split", "val"]) == 0
    found = find_captions(tmp_path / "pairs", "val")

    expected, members = [], []
    for image, rows in enumerate(data.by_image()):
        for box in proposals[data.image_ids[image]]:
            hits = [
                data.phrases[i] for i in rows if overlap(box, list(map(int, enclosing(data.phrases[i].boxes)))) >= 0.7
            ]
            if hits:
                expected.append((box, list(dict.fromkeys(phrase.text for phrase in hits))))
                members.append({id(phrase) for phrase in hits})
    assert found.captions == [texts for _, texts in expected]
    assert len(expected) > 2 * len(data)
    for i, (box, _) in enumerate(expected):
        assert found.images.open(i).size == (box[2] - box[0], box[3] - box[1])
        for j in range(i):
            if members[i] & members[j]:
                assert found.classes[i] == found.classes[j]
    assert len({name.split("/")[0] for name in found.classes}) == len(data)
    with pytest.raises(UserError, match="val exists"):
        main([*options, "--split", "val"])


def test_without_proposals_the_boxes_themselves_are_cropped(tmp_path, capsys):
    boxes = [("a dog", 0, 0, 20, 20), ("its head", 0, 0, 9, 9), ("the dog", 1, 0, 19, 20), ("the animal", 0, 0, 20, 20)]
    rows = [{"id": 1, "regions": [region(i, *one) for i, one in enumerate(boxes)]}]
    root = write(tmp_path / "vg", rows)
    assert main(["--data", str(root), "--split", "all", "--out", str(tmp_path / "pairs")]) == 0
    assert "3 crops with 7 captions; 0 of 4 phrases" in capsys.readouterr().out
    found = find_captions(tmp_path / "pairs", "all")
    dog = ["a dog", "the dog", "the animal"]
    assert found.captions == [dog, ["its head"], dog]  # the second box of the dog is 95 % of the first
    assert found.classes == ["1/0", "1/1", "1/0"]
    assert [found.images.open(i).size for i in range(3)] == [(20, 20), (9, 9), (19, 20)]


def test_nothing_to_write_is_an_error_and_leaves_nothing(scenes, tmp_path, capsys):
    (tmp_path / "boxes.json").write_text(
        json.dumps({one: [[0, 0, 2, 2]] for one in find_phrases(scenes, "val").image_ids})
    )
    options = ["--data", str(scenes), "--split", "val", "--proposals", str(tmp_path / "boxes.json")]
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main([*options, "--out", str(tmp_path / "pairs")]))
    assert end.value.code == 2
    assert "No box has an IoU of 0.7" in capsys.readouterr().err
    assert not list((tmp_path / "pairs").iterdir())
