"""Fashion200k in its published layout: pairs whose descriptions differ in one word."""

from pathlib import Path

import pytest

from probemb.data.compositions.find import find_compositions
from probemb.data.randomness import stream_of
from tests.world import picture, save

TRAIN = {
    "dress_train": ["red silk dress", "blue silk dress", "red silk dress", "red wool dress", "odd thing of five words"],
    "top_train": ["green silk top", "green wool top"],
}
TEST = {"dress_test": ["black lace dress", "white lace dress", "white lace dress", "alone & far away"]}


def write_fashion200k(folder: Path) -> Path:
    """The pictures, labels and two published queries; returns the folder."""
    for name, texts in {**TRAIN, **TEST}.items():
        lines = []
        for i, text in enumerate(texts):
            path = f"women/{name}/{i}/{i}_0.jpeg"
            save(folder / path, picture((i, len(name), 0), format="JPEG"))
            lines.append(f"{path}\t{-1.5 + i}\t{text}\n")
        save(folder / "labels" / f"{name}_detect_all.txt", "".join(lines))
    (folder / "test_queries.txt").write_text(
        "women/dress_test/0/0_0.jpeg women/dress_test/1/1_0.jpeg\n"
        "women/dress_test/2/2_0.jpeg women/dress_test/0/0_0.jpeg\n"
    )
    return folder


NEIGHBOURS = {
    ("red silk dress", "blue silk dress"), ("red silk dress", "red wool dress"), ("green silk top", "green wool top"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write_fashion200k(tmp_path)


def test_training_examples_change_one_word(folder):
    data = find_compositions(folder, "train")
    texts = [text for one in TRAIN.values() for text in one]
    assert len(data) == 7
    assert data.n_examples == 6  # all but the odd one
    assert data.k == 2
    pairs = set()
    for row in range(300):
        (image, change), concepts, target = data.draw(row % 6, stream_of("test", row))
        assert image.image == data.sources[row % 6]
        before, after = texts[image.image], texts[target]
        assert [data.concepts[one] for one in concepts] == [after]
        assert list(concepts) == data.held[target]
        [x] = [word for word in before.split() if word not in after.split()]
        [y] = [word for word in after.split() if word not in before.split()]
        assert change.text == f"replace {x} with {y}"
        assert before.replace(x, y) == after
        pairs.add((before, after))
    assert pairs == NEIGHBOURS | {(b, a) for a, b in NEIGHBOURS}


def test_published_queries_and_their_targets(folder):
    data = find_compositions(folder, "test")
    one, two = data.queries
    assert one.kind == two.kind == "mixed"
    assert [part.text for part in one.parts] == [None, "replace black with white"]
    assert two.parts[1].text == "replace white with black"
    assert [data.targets(query.concepts).tolist() for query in (one, two)] == [[1, 2], [0]]
    assert data.images.open(one.parts[0].image).size == (16, 16)
    sampled = data.sampled_queries(2)
    assert len(sampled) == 2
    assert sampled == data.sampled_queries(2)
    assert len(data.sampled_queries(10)) == 3
    (folder / "test_queries.txt").unlink()
    assert find_compositions(folder, "test").queries is None
