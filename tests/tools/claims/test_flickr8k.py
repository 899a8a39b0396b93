"""The claims on photographs at a tiny size: drawn scenes in Flickr8k's form, one seed, one epoch."""

import json

import numpy as np
import pytest
import torch

from probemb.data.scenes import draw_captions, scene
from probemb.errors import UserError
from probemb.metrics import Positives
from tests.world import jpeg, write_tar
from tools.claims import command as claims
from tools.claims.flickr8k import measuring, world
from tools.claims.flickr8k.study import Flickr8k
from tools.claims.flickr8k.training import CHOSEN, Settings, create, embed
from tools.claims.flickr8k.world import Files, KeptFeatures, Loader, bucketed_order, read_world
from tools.claims.queue import Archive

SETTINGS = Settings(name="resnet-gru-small", min_count=1, batch_size=20, epochs=1)
SIZES = {"train": 24, "val": 8, "test": 8}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flickr8k")
    told = {}
    for split, count in SIZES.items():
        content = {}
        for i in range(count):
            one = scene(f"photographs {split}", i)
            texts = [caption.text for caption in draw_captions(one)]
            told[split, i] = texts
            content[f"{split}{i:02d}.jpg"] = jpeg(one, 64)
            content[f"{split}{i:02d}.txt"] = "\n".join(texts).encode()
        write_tar(folder / f"{split}-00000.tar", content.items())
    words = sorted({word for texts in told.values() for text in texts for word in text.lower().split()})[:20]
    vectors = folder / "vectors.txt"
    vectors.write_text("".join(f"{word} " + " ".join(["0.1"] * 24) + "\n" for word in words if word.isalpha()))
    judged = folder / "judgements.tsv"
    lines = ["image\tcaption_image\tcaption_index\tyes\tno"]
    rng = np.random.default_rng(0)
    for image in range(8):
        for other in range(8):
            yes = int(rng.integers(0, 4))
            lines.append(f"test{image:02d}\ttest{other:02d}\t0\t{yes}\t{3 - yes}")
    judged.write_text("\n".join(lines) + "\n")
    captions = {f"{i:012d}": {"image_id": i, "captions": [{"id": 10 * i + k, "caption": text} for k, text in
                enumerate(told["test", i])]} for i in range(8)}  # fmt: skip
    coco = folder / "coco"
    coco.mkdir()
    pictures = {f"{i:012d}.jpg": jpeg(scene("photographs test", i), 64) for i in range(8)}
    texts = {f"{name}.json": json.dumps(about).encode() for name, about in captions.items()}
    bare = {"000000000099.jpg": pictures["000000000000.jpg"], "000000000099.json": b'{"image_id": 99}'}
    write_tar(coco / "captioned-00000.tar", sorted({**pictures, **texts, **bare}.items()))
    return Files(folder, None, vectors, judged, coco)


@pytest.fixture(scope="module")
def photographs(files, tmp_path_factory):
    return read_world(files, SETTINGS, tmp_path_factory.mktemp("features"), lambda line: None)


def test_features_are_those_of_the_tower(photographs):
    part = photographs.validation
    maps = part.maps(torch.tensor([3, 1]))
    assert maps.shape[:2] == (2, part.pooled.shape[1])
    torch.testing.assert_close(maps.mean((2, 3)), part.pooled[[3, 1]], atol=5e-3, rtol=5e-3)
    assert maps.shape[1] == photographs.channels  # this tower has the same features for both heads
    whole, again = KeptFeatures(photographs.channels, probabilistic=True).unpack(maps)
    assert again is whole
    mean, unc = KeptFeatures(photographs.channels - 5, probabilistic=True).unpack(maps)
    assert torch.equal(unc.tokens, whole.tokens[..., -5:])
    assert torch.equal(unc.pooled, whole.pooled[..., -5:])
    assert torch.equal(mean.pooled, whole.pooled[..., :-5])
    torch.testing.assert_close(whole.pooled, maps.mean((2, 3)))
    assert torch.equal(whole.tokens[0, 1], maps[0].flatten(1)[:, 1])  # cell after cell
    averaged, none = KeptFeatures(photographs.channels, probabilistic=False).unpack(part.pooled)
    assert none is None
    assert torch.equal(averaged.pooled, part.pooled)


def test_the_tower_itself_gives_the_same_embeddings(photographs, files):
    from probemb.data.captions.find import find_captions
    from probemb.models import create_transforms

    config = Flickr8k(files, SETTINGS).plan([0])[0].config(SETTINGS)
    model = create(photographs, SETTINGS, config)[0].eval()
    kept, _ = embed(model, photographs.test, whole_maps=False)
    dataset = find_captions(files.data, "test")
    whole = world.reading_model(SETTINGS, photographs.vocabulary, None)  # its trunk is the one of the features
    transform = create_transforms(whole).evaluate
    model.image_tower.trunk, model.image_tower.feature_layout = whole.image_tower.trunk, None
    with torch.no_grad():
        pixels = torch.stack([transform(dataset.images.open(i)) for i in range(8)])
        features = whole.image_tower.features(pixels)[0]
        mean = torch.nn.functional.normalize(model.image_tower.mean_head(features), dim=-1)
    torch.testing.assert_close(kept.mean, mean, atol=2e-3, rtol=2e-2)


def test_batches_have_captions_of_similar_length():
    lengths = np.random.default_rng(0).integers(1, 30, 1000)
    order = bucketed_order(lengths, 20, seed=3, epoch=1)
    assert order.shape == (50, 20)
    assert sorted(order.ravel()) == list(range(1000))
    assert np.array_equal(order, bucketed_order(lengths, 20, seed=3, epoch=1))
    assert not np.array_equal(order, bucketed_order(lengths, 20, seed=3, epoch=2))
    padded = lengths[order].max(1).sum() * 20
    assert padded < 1.2 * lengths.sum()
    longest = lengths[order].max(1)
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.5  # batches are in random order


def test_a_loader_starts_anywhere(photographs):
    loader = Loader(photographs.train, 20, 0, whole_maps=False)
    assert loader.steps == 6
    whole = list(loader.epoch(2))
    for batch, again in zip(whole[4:], loader.epoch(2, start_step=4), strict=True):
        assert torch.equal(batch.pair_index, again.pair_index)
        owner = torch.tensor(photographs.train.dataset.owner())[batch.pair_index]
        assert torch.equal(batch.image_index, owner)
        assert torch.equal(batch.images, photographs.train.pooled[owner])


def test_the_tolerance_is_chosen_on_validation(photographs, files):
    config = next(one for one in Flickr8k(files, SETTINGS).plan([0]) if one.name == "pcmepp").config(SETTINGS)
    pair = embed(create(photographs, SETTINGS, config)[0], photographs.validation, whole_maps=False)
    dataset = photographs.validation.dataset
    chosen = measuring.tolerance_by_validation(pair, dataset)
    assert "validation" in chosen.chosen
    positives = measuring.own_positives(dataset)
    best = measuring.retrieval(*pair, positives, "tolerance", tolerance=chosen)["rsum"]
    for name in ("csd", "mean"):  # weights of 1 and 0 are among those that were tried
        assert best >= measuring.retrieval(*pair, positives, name)["rsum"] - 1e-6


def test_refusal_by_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    images, texts = (
        measuring.Gaussian(torch.nn.functional.normalize(torch.randn(n, 4, generator=generator), dim=1),
                           torch.randn(n, 4, generator=generator) - 3) for n in (6, 12)
    )  # fmt: skip
    owner = torch.arange(6).repeat_interleave(2)
    positives = Positives.from_pairs(owner, torch.arange(12), 6, 12)
    found = measuring.refusal(images, texts, positives, "csd")["captions"]
    u, hits = texts.uncertainty(), []
    for j in range(12):
        distances = [float((images.mean[i] - texts.mean[j]).square().sum() + images.uncertainty()[i]) for i in range(6)]
        hits.append(distances.index(min(distances)) == owner[j])
    ranked = sorted(range(12), key=lambda j: float(u[j]))
    assert found["all"] == pytest.approx(sum(hits) / 12)
    assert found["certain"] == pytest.approx(sum(hits[j] for j in ranked[:6]) / 6)
    assert found["uncertain"] == pytest.approx(sum(hits[j] for j in ranked[6:]) / 6)


def test_a_run_and_its_report(files, tmp_path, capsys):
    torch.set_num_threads(1)
    study = Flickr8k(files, SETTINGS)
    plan = study.plan([0])
    assert {one.method for one in plan} == {name.partition(" ")[0] for name in CHOSEN}
    content = claims.run(study, tmp_path / "claims", n_seeds=1)
    titles = [claim["title"].partition(".")[0] for claim in content["claims"]]
    assert titles == ["1", "2", "3", "4", "5", "6", "7"]
    found = {one["name"]: one for one in content["trainings"]}
    assert len(found) == len(plan)
    assert found["recipe noise 50%"]["noise"] == 0.5
    assert set(found["recipe"]["retrieval"]) == {"csd", "mean", "tolerance"}
    assert set(found["pcme"]["retrieval"]) == {"csd", "mean", "tolerance", "match-probability"}
    assert set(found["ncr noise 20%"]["retrieval"]) == {"mean"}
    assert found["recipe"]["coco"]["csd"]["own"]["rsum"] > 0
    assert {"tolerance", "inclusion", "log-likelihood", "u"} <= set(found["recipe"]["judged"])
    assert set(found["infonce"]["judged"]) == {"mean"}
    assert (tmp_path / "claims" / "report.html").read_text().count("<svg") == 5
    again = claims.run(study, tmp_path / "claims", n_seeds=1, report_only=True)
    for one, other in zip(content["trainings"], again["trainings"], strict=True):
        assert one["retrieval"] == other["retrieval"]
        assert one["judged"] == other["judged"]
    assert "1. Methods" in capsys.readouterr().out
    with pytest.raises(UserError, match="other settings"):
        Archive(tmp_path / "claims", Flickr8k(files))


def test_options_of_another_world_are_refused(tmp_path):
    with pytest.raises(UserError, match="--data is missing"):
        claims.main(["--world", "flickr8k", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="--word-vectors has no use"):
        claims.main(["--word-vectors", "x.txt", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="no file"):
        claims.main(["--world", "flickr8k", "--data", str(tmp_path), "--judgements", str(tmp_path / "none.tsv")])
