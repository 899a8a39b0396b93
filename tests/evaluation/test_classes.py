"""Retrieval by class and the distances of PCME's Table 1, through the command, on scenes by class."""

import pytest
import torch

from probemb import Gaussian
from probemb.data.captions.find import find_captions
from probemb.evaluation.benchmarks import CLASS, OWN, TRUE, known_positives
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.rankings import RankingOptions, numbers_per_item
from tools.make_scenes import Plan, make


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    out = tmp_path_factory.mktemp("birds") / "world"
    make(Plan(train=0, val=0, classes_images=0, size=32, captions=2, class_captions=96), out, workers=1)
    return out / "by-class"


def test_captions_of_the_class_are_positives_and_lost_images_are_left_out(birds):
    data = find_captions(birds, "test")
    kept = [i for i in range(len(data)) if i != 3]
    owner = torch.arange(len(kept)).repeat_interleave(2)
    pairs = EmbeddedPairs(Gaussian(*torch.zeros(2, 23, 4)), Gaussian(*torch.zeros(2, 46, 4)), owner, kept, [])
    kinds = known_positives(pairs, data)
    assert list(kinds) == [OWN, CLASS, TRUE]
    names = [data.classes[i] for i in kept]
    for i, name in enumerate(names):
        wanted = [j for j in range(46) if names[owner[j]] == name]
        found = kinds[CLASS].of_queries(i, i + 1).keys.tolist()
        assert found == wanted
        assert set(kinds[OWN].of_queries(i, i + 1).keys.tolist()) <= set(wanted)


def test_several_embeddings_are_kept_whole():
    g = Gaussian(*torch.zeros(2, 5, 4, 8))
    assert numbers_per_item("multi-instance", g, RankingOptions()) == 32
