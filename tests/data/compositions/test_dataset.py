"""One split: targets, training examples, queries and the table of their parts."""

from collections import Counter

import numpy as np

from probemb.data.compositions.dataset import query_parts
from probemb.data.randomness import stream_of
from tests.compositions import made
from tests.world import picture, save

N, C = 40, 6
RANDOM = np.random.RandomState(0)
HELD = [set(RANDOM.choice(C, 3, replace=False).tolist()) for _ in range(N)]
TUPLES = np.array([(0, 1), (1, 2), (3, 5)])


DATA = made(HELD, C, tuples=TUPLES)


def test_examples_have_targets_and_parts_with_their_concepts():
    kinds, targets = Counter(), Counter()
    for row in range(400):
        parts, concepts, target = DATA.draw(row % 3, stream_of("test", row))
        assert concepts == tuple(TUPLES[row % 3])
        assert set(concepts) <= HELD[target]
        for part, concept in zip(parts, concepts):
            assert part.concept == concept
            if part.is_image:
                assert concept in HELD[part.image]
                assert part.image != target
            else:
                assert part.text == f"concept {concept}"
        kinds[tuple(part.is_image for part in parts)] += 1
        targets[target] += row % 3 == 0
    assert len(kinds) == 4
    assert all(70 < number < 130 for number in kinds.values())  # a quarter of 400 each
    assert {i for i, n in targets.items() if n} == set(DATA.targets([0, 1]).tolist())
    assert DATA.draw(1, stream_of("x")) == DATA.draw(1, stream_of("x"))


def test_queries_ask_every_combination_in_every_mixture_and_do_not_hold_their_answers():
    queries = DATA.sampled_queries(24, seed=4)
    assert Counter(query.kind for query in queries) == {"images": 6, "texts": 6, "mixed": 12}
    mixtures = Counter((query.concepts, tuple(part.is_image for part in query.parts)) for query in queries)
    assert set(mixtures.values()) == {2}
    assert len(mixtures) == 12
    for query in queries:
        for part, concept in zip(query.parts, query.concepts):
            if part.is_image:
                assert concept in HELD[part.image]
                assert not set(query.concepts) <= HELD[part.image]
    assert queries == DATA.sampled_queries(24, seed=4)
    assert queries[:7] == DATA.sampled_queries(7, seed=4)
    assert queries != DATA.sampled_queries(24, seed=5)
    asked = DATA.sampled_queries(4, tuples=np.array([(0, 2)]))
    assert {query.concepts for query in asked} == {(0, 2)}
    assert DATA.sampled_queries(5, tuples=np.empty((0, 2), np.int64)) == []


def test_the_table_of_parts_has_each_part_once(tmp_path):
    files = [save(tmp_path / f"{i}.png", picture((i, 0, 0), size=8)) for i in range(N)]
    boxes = [(0, 0, 4.2, 3), (2, 2, 8, 8)]
    data = made(HELD, C, [[(c, boxes[i % 2]) for c in mine] for i, mine in enumerate(HELD)], files, TUPLES)
    queries = data.sampled_queries(30)
    images, texts, rows = query_parts(data.images, queries)
    assert rows.shape == (30, 2)
    assert len(set(texts)) == len(texts)
    assert sorted(set(rows[rows >= 0].tolist())) == list(range(len(images)))
    for query, row in zip(queries, rows):
        for part, place in zip(query.parts, row):
            if not part.is_image:
                assert texts[-place - 1] == part.text
                continue
            found = images.open(place)
            assert found.getpixel((0, 0)) == (part.image, 0, 0)
            assert found.size == ((5, 3) if part.box[0] == 0 else (6, 6))
            assert images.places[place].file == str(files[part.image])
