"""Visual Genome's region descriptions in their published layout, what is refused, and the triplets of crops."""

import json

from probemb.data.boxes import Phrase, PhraseDataset, crop_triplets, find_phrases, stream_list
from probemb.data.image_loader import Images, Place
from tests.world import picture, save


def region(number, phrase, x, y, width, height):
    place = {"x": x, "y": y, "width": width, "height": height}
    return {"region_id": number, "image_id": 0, "phrase": phrase, **place}


ROWS = [
    {"id": 1, "regions": [region(10, "a dog ", 0, 0, 20, 20), region(11, "the\n sky", 5, -5, 100, 15)]},
    {"id": 2, "regions": []},
    {"id": 3, "regions": [region(12, "grass", 10, 10, 30, 20), region(13, "far away", 90, 90, 5, 5)]},
]


def write(root, rows=ROWS):
    save(root / "region_descriptions.json", rows)
    sizes = [{"image_id": i, "width": 60, "height": 40, "url": "x", "coco_id": None} for i in (1, 2, 3)]
    save(root / "image_data.json", sizes)
    for name in ("VG_100K/1.jpg", "VG_100K_2/3.jpg"):
        save(root / name, picture((200, 10, 10), (60, 40), "JPEG"))
    return root


def test_regions_are_phrases_with_one_box(tmp_path):
    root = write(tmp_path / "vg")
    for place in (tmp_path, root, root / "region_descriptions.json"):
        found = find_phrases(place, "auto")
        assert found.image_ids == ["1", "3"]
        assert [(p.image, p.text, p.boxes) for p in found.phrases] == [
            (0, "a dog", ((0, 0, 20, 20),)),
            (0, "the sky", ((5, 0, 60, 10),)),
            (1, "grass", ((10, 10, 40, 30),)),
        ]
        assert found.without_box == 1  # outside the image
        assert [found.images.open(i).size for i in (0, 1)] == [(60, 40)] * 2


def test_lists_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("probemb.data.boxes._PIECE", 7)
    file = tmp_path / "x.json"
    rows = [{"id": i, "text": 'a ], } "quoted" é' * i} for i in range(9)]
    file.write_text(" \n" + json.dumps(rows, indent=2, ensure_ascii=False))
    assert list(stream_list(file)) == rows
    file.write_text("[ ]")
    assert list(stream_list(file)) == []


def dataset(*regions):
    """One image of 100 x 100 for each list of (text, box)."""
    phrases = [Phrase(i, text, "", (box,)) for i, some in enumerate(regions) for text, box in some]
    names = [str(i) for i in range(len(regions))]
    images = Images(places=[Place(name, name) for name in names], source="x")
    return PhraseDataset(images, names, [(100, 100)] * len(names), phrases)


def test_triplets_of_crops():
    data = dataset(
        [
            ("too large", (0, 0, 90, 90)),
            ("a", (0, 0, 40, 40)),  # 16 %
            ("close", (10, 10, 40, 40)),
            ("b", (60, 50, 80, 70)),
            ("touches", (30, 30, 60, 60)),
        ],
        [("alone", (0, 0, 10, 10)), ("too large", (0, 0, 99, 99))],
    )
    (found,) = crop_triplets(data, 0.2)
    assert found.image == 0
    assert found.captions == ("a", "b", "a and b")
    assert found.boxes == ((0, 0, 40, 40), (60, 50, 80, 70), (0, 0, 80, 70))
    (fewer,) = crop_triplets(data, 0.2, candidates=3)  # b is the fourth largest
    assert fewer.captions == ("a", "touches", "a and touches")
    (larger, second) = crop_triplets(data, 0.99)
    assert larger.captions[0] == second.captions[0] == "too large"
    assert crop_triplets(data, 0.001) == []
