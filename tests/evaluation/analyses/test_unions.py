"""Crops and their union: embedded once each, uncertainty and selection against loops over single triplets."""

import pytest
import torch

from probemb import Gaussian, distances
from probemb.data.boxes import CropTriplet, crop_triplets, find_phrases
from probemb.evaluation.analyses.localisation import crop
from probemb.evaluation.analyses.unions import (
    TASKS,
    EmbeddedTriplets,
    binary_selection,
    embed_triplets,
    union_uncertainty,
)
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import RankingOptions
from probemb.evaluation.uncertainty import MEASURES
from probemb.models import create_model, create_tokenizer, create_transforms

N, D = 9, 6
BOX = (0.0, 0.0, 1.0, 1.0)


def drawn(seed, *shape):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(*shape, generator=r), dim=-1)
    return Gaussian(mean, torch.randn(*shape, generator=r) - 2)


def some(shape=(N, D)):
    triplets = [CropTriplet(i, (BOX, BOX, BOX), ("a", "b", "a and b")) for i in range(shape[0])]
    images = {item: drawn(i, *shape) for i, item in enumerate("ABC")}
    return EmbeddedTriplets(images, {item: drawn(5 + i, *shape) for i, item in enumerate("ABC")}, triplets)


@pytest.mark.parametrize("ranking", ["csd", "mean", "kl"])
def test_selection_against_loops(ranking, monkeypatch):
    monkeypatch.setattr("probemb.evaluation.analyses.unions.BLOCK", 4)
    found = some()
    closeness = {
        "mean": lambda a, b: a.mean @ b.mean.T,
        **{name: lambda a, b, name=name: -distances.get_distance(name)(a, b) for name in ("csd", "kl")},
    }[ranking]

    def score(crop, caption, i):
        return float(closeness(found.images[crop][i : i + 1], found.captions[caption][i : i + 1]))

    right = {
        "crop A": [score("A", "A", i) > score("A", "C", i) for i in range(N)],
        "crop C": [score("C", "C", i) > score("C", "A", i) for i in range(N)],
        "caption A": [score("A", "A", i) > score("C", "A", i) for i in range(N)],
        "caption C": [score("C", "C", i) > score("A", "C", i) for i in range(N)],
    }
    measured = binary_selection(found, ranking, RankingOptions())
    assert set(measured) == {*TASKS, "mean"}
    for task, values in right.items():
        assert measured[task]["value"] == pytest.approx(sum(values) / N)
        assert measured[task]["se"] == pytest.approx(float(torch.tensor(values).double().std()) / N**0.5)
    assert measured["mean"]["value"] == pytest.approx(sum(map(sum, right.values())) / (4 * N))


@pytest.mark.parametrize("name", MEASURES)
def test_uncertainty_against_loops(name):
    found = some()
    by_hand = {
        "sum": lambda v: v.sum(),
        "log-det": lambda v: torch.logdet(torch.diag(v)),
        "geometric-mean": lambda v: v.sqrt().log().mean().exp(),
    }[name]
    for side in ("images", "captions"):
        items = getattr(found, side)
        u = {item: torch.stack([by_hand(v) for v in items[item].var]).double() for item in "ABC"}
        measured = union_uncertainty(found)[name][side]
        for item in "ABC":
            assert measured[item]["value"] == pytest.approx(float(u[item].mean()), rel=1e-5)
        difference = u["C"] - u["A"]
        assert measured["difference"]["value"] == pytest.approx(float(difference.mean()), rel=1e-4, abs=1e-6)
        assert measured["difference"]["se"] == pytest.approx(float(difference.std()) / N**0.5, rel=1e-4)
        assert measured["larger"]["value"] == pytest.approx(float((difference > 0).double().mean()))


@pytest.fixture
def phrases(boxed_scenes):
    return find_phrases(boxed_scenes / "visual_genome")


@pytest.fixture(scope="module")
def embedder():
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32").eval().requires_grad_(False)
    return Embedder(model, create_tokenizer(model), create_transforms(model).evaluate, batch_size=4)


def test_every_crop_is_its_own_and_embedded_once(phrases, embedder):
    thresholds = (0.05, 0.4, 0.9)
    seen = []

    class Counting(Embedder):
        def pixels(self, batches, progress=None):
            batches = list(batches)
            seen.extend(len(batch) for batch in batches)
            return super().pixels(batches, progress)

    counting = Counting(embedder.model, embedder.tokenizer, embedder.transform, batch_size=4)
    found, bad = embed_triplets(counting, phrases, thresholds)
    assert not bad
    distinct = {(one.image, box) for t in thresholds for one in crop_triplets(phrases, t) for box in one.boxes}
    assert sum(seen) == len(distinct)
    assert list(found) == [t for t in thresholds if crop_triplets(phrases, t)]
    for threshold, one in found.items():
        assert one.triplets == crop_triplets(phrases, threshold)
        for row, triplet in enumerate(one.triplets):
            picture = phrases.images.open(triplet.image)
            for item, box, caption in zip("ABC", triplet.boxes, triplet.captions):
                pixels = embedder.transform(crop(picture, box))[None]
                image = embedder.model.encode_image(pixels)
                torch.testing.assert_close(one.images[item].mean[row], image.mean[0], rtol=1e-4, atol=1e-5)
                text = embedder.model.encode_text(embedder.tokenizer([caption]))
                torch.testing.assert_close(one.captions[item].log_var[row], text.log_var[0], rtol=1e-4, atol=1e-4)
            assert triplet.captions[2] == f"{triplet.captions[0]} and {triplet.captions[1]}"
