"""Localisation against plain loops over phrases and proposals, on drawn scenes."""

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.cross_attention import CrossAttention, attention_scores, unit_tokens
from probemb.data.boxes import find_phrases, grid_proposals, read_region_proposals
from probemb.distances import csd
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.localisation import crop, localise
from probemb.evaluation.rankings import RankingOptions
from probemb.models import create_model, create_tokenizer, load_model


@pytest.fixture
def entities(boxed_scenes):
    return boxed_scenes / "entities"


@pytest.fixture
def embedder(run_folder):
    model, tokenizer, transforms = load_model(run_folder)
    return Embedder(model, tokenizer, transforms.evaluate, batch_size=7)


def overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    sizes = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return shared / (sum(sizes) - shared)


def meant(boxes, several, proposal):
    if several == "any":
        return max(overlap(proposal, box) for box in boxes)
    corners = list(zip(*boxes))
    return overlap(proposal, (min(corners[0]), min(corners[1]), max(corners[2]), max(corners[3])))


@pytest.mark.parametrize("several", ["merged", "any"])
def test_ranks_and_overlaps(embedder, entities, several):
    data = find_phrases(entities, "test")
    proposals = grid_proposals(data, [0.4, 0.8], [1.0], 0.5)
    found = localise(embedder, data, proposals, ["csd", "mean"], RankingOptions(), several)
    assert found.rows == list(range(len(data.phrases)))
    assert any(len(phrase.boxes) > 1 for phrase in data.phrases)
    for image, some in enumerate(data.by_image()):
        picture = data.images.open(image)
        boxes = proposals.boxes[image]
        crops = [picture.crop([round(b[0] - 0.49), round(b[1] - 0.49), round(b[2] + 0.49), round(b[3] + 0.49)])
                 for b in boxes]  # fmt: skip
        with torch.no_grad():
            items = embedder.model.encode_image(torch.stack([embedder.transform(one) for one in crops]))
            texts = embedder.model.encode_text(embedder.tokenizer([data.phrases[row].text for row in some]))
        scores = {"csd": -csd(items, texts), "mean": items.mean @ texts.mean.T}
        for place, row in enumerate(some):
            overlaps = [meant(data.phrases[row].boxes, several, box) for box in boxes]
            assert found.best_overlap[row] == pytest.approx(max(overlaps), abs=1e-5)
            good = sum(one >= 0.5 for one in overlaps)
            assert found.chance[row, 0] == pytest.approx(good / len(boxes), abs=1e-6)
            for name, of in scores.items():
                first = found.first[name][row].tolist()
                best = of[:, place].sort(descending=True).values[:10]
                assert of[first, place].tolist() == pytest.approx(best.tolist(), abs=2e-4)
                np.testing.assert_allclose(found.first_overlaps[name][row], [overlaps[i] for i in first], atol=1e-5)
            assert found.u[row] == pytest.approx(float(texts.uncertainty()[place]), rel=1e-4)


def test_a_crop_covers_its_box():
    picture = Image.fromarray(np.arange(48 * 48 * 3, dtype=np.uint32).reshape(48, 48, 3).astype(np.uint8))
    assert crop(picture, (4, 6, 20, 30)).size == (16, 24)
    assert crop(picture, (4.2, 6.7, 19.1, 29.0)).size == (16, 23)  # every pixel that the box touches
    assert crop(picture, (2, 3, 10, 15), (2.0, 2.0)).size == (16, 24)  # the picture is twice the annotated size
    assert crop(picture, (46.0, 46.0, 60.0, 60.0)).size == (2, 2)
    assert np.array_equal(np.asarray(crop(picture, (4, 6, 20, 30))), np.asarray(picture)[6:30, 4:20])


WORDS = ["a", "red", "blue", "green", "circle", "square", "large", "small", "the", "star"]


def regions_of(data, folder, p=5, width=437):
    """Files of p proposals an image, the last image with fewer."""
    r = np.random.RandomState(0)
    corner = r.rand(len(data), p, 2) * 20
    boxes = np.concatenate([corner, corner + 5 + 20 * r.rand(len(data), p, 2)], 2)
    features = r.randn(len(data), p, width).astype(np.float32)
    boxes[-1, 3:], features[-1, 3:] = 0, 0
    np.save(folder / "test_ims.npy", features)
    np.save(folder / "test_boxes.npy", boxes)
    (folder / "test_ids.txt").write_text("\n".join(data.image_ids))
    return features


def region_embedder(name, size=3, **options):
    torch.manual_seed(0)
    model = create_model(name, vocabulary=WORDS, **options).eval()
    return Embedder(model, create_tokenizer(model), lambda regions: regions, batch_size=size)


def test_a_scan_model_scores_phrases_with_each_region(entities, tmp_path):
    how = CrossAttention("i2t")
    embedder = region_embedder(
        "scan-scenes-gru", head="average", probabilistic=False, ranking="attention", attention={"direction": "i2t"}
    )
    data = find_phrases(entities, "test", sample=3)
    features = regions_of(data, tmp_path)
    proposals = read_region_proposals(tmp_path / "test_ims.npy", data, None)
    options = RankingOptions(attention=embedder.model.attention)
    found = localise(embedder, data, proposals, ["attention", "mean"], options, "merged")
    model = embedder.model
    for image, some in enumerate(data.by_image()):
        for row in some:
            with torch.no_grad():
                text = model.text_tower(embedder.tokenizer([data.phrases[row].text]), want_tokens=True)
                of_region = [
                    model.image_tower(torch.from_numpy(features[image, r])[None, None], want_tokens=True)
                    for r in proposals.rows[image]
                ]
            words = unit_tokens(text.tokens, text.mask)
            regions = [unit_tokens(one.tokens, one.mask) for one in of_region]
            scores = {
                "attention": [float(attention_scores(one, words, how)) for one in regions],
                "mean": [float(one.gaussian.mean[0] @ text.gaussian.mean[0]) for one in of_region],
            }
            for name, of in scores.items():
                first = [i for i in found.first[name][row].tolist() if i >= 0]
                assert len(first) == len(proposals.rows[image])
                assert [of[i] for i in first] == pytest.approx(sorted(of, reverse=True), abs=2e-3)
