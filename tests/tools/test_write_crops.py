"""tools.write_crops: crops and their phrases against plain loops, read back as data to finetune on."""

import json

from probemb.data.boxes import enclosing, find_phrases
from probemb.data.captions.find import find_captions
from tests.data.boxes.test_visual_genome import region, write
from tools.write_crops import main


def overlap(a, b):
    """IoU of two boxes with whole corners, by counting pixels."""
    first, second = ({(x, y) for x in range(p[0], p[2]) for y in range(p[1], p[3])} for p in (a, b))
    return len(first & second) / len(first | second)


def test_a_crop_has_the_phrases_whose_boxes_it_overlaps_by_070(boxed_scenes, tmp_path):
    data = find_phrases(boxed_scenes / "entities", "val")
    proposals = {}
    for phrase in data.phrases:  # each box whole, cut by a pixel, and far too large
        left, top, right, bottom = map(int, enclosing(phrase.boxes))
        some = proposals.setdefault(data.image_ids[phrase.image], [[0, 0, 48, 48]])
        some += [[left, top, right, bottom], [left, top, right - 1, bottom], [left, top, 48, 48]]
    (tmp_path / "boxes.json").write_text(json.dumps(proposals))
    options = ["--proposals", str(tmp_path / "boxes.json"), "--out", str(tmp_path / "pairs"), "--split", "val"]
    assert main(["--data", str(boxed_scenes / "entities"), *options]) == 0
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
