"""The comparison of composers: a tiny real run that is taken up again, its parts, and what its options refuse."""

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file

from finetune.methods.registry import METHODS
from probemb.data.compositions.crops import Crops
from probemb.data.compositions.shards import read_concept_shards
from probemb.data.image_loader import cropped
from probemb.errors import UserError
from probemb.evaluation.composed import embed_queries, measure_composed
from probemb.evaluation.embedding import Embedder
from probemb.models import create_tokenizer, create_transforms
from tools.claims import command as claims
from tools.claims.composed import findings
from tools.claims.composed.findings import average
from tools.claims.composed.measuring import chance, embed, rarity_auc, retrieval
from tools.claims.composed.study import Composed
from tools.claims.composed.training import Settings, config_of, create, repeats_of, settings_of
from tools.claims.composed.trunk import batches, train_trunk
from tools.claims.composed.variants import (
    APART,
    CHOSEN,
    LEARNING_RATES,
    SEEN,
    THREE,
    UNSEEN,
    VARIANTS,
    composed_variants,
    neighbours,
    training_of,
)
from tools.claims.composed.world import INFEASIBLE, Files, KeptRows, Loader, make_model, read_world
from tools.claims.queue import Archive
from tools.make_scenes import Plan, make

IMAGES = 360
SETTINGS = Settings(
    embed_dim=16, batch_size=16, repeats=1, epochs=1, images=IMAGES, pixels=32, pictures=32, trunk_batch=8,
    validation_queries=12, test_queries=128,
)  # fmt: skip
TRAINED_APART = 20  # pairs
NAMES = ["mpc", "pcme-addition", "tirg", "mpc unseen", "tirg unseen"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with the drawn world, whose few pictures have short lists of their own."""
    out = tmp_path_factory.mktemp("composed")
    make(Plan(train=0, val=0, classes_images=0, size=32, compositions=IMAGES), out / "scenes", workers=1)
    folder = out / "scenes" / "compositions"
    held = read_concept_shards(folder, 0)
    splits = [held.split(name).holdings() for name in ("train", "val", "test")]
    for k, number in ((2, 60), (3, 20), (4, 6)):
        sets = [
            {one for i in range(len(s)) for one in combinations(s.of_image(i).tolist(), k)} for s in splits
        ]  # fmt: skip
        everywhere = [[concept + 1 for concept in one] for one in sorted(set.intersection(*sets) or sets[0] & sets[2])]
        assert len(everywhere) > number / 2
        (folder / f"{k}_cat_combinations.json").write_text(json.dumps(everywhere[:number]))
        if k == 2:
            (folder / "2_cat_combinations_zero_shot.json").write_text(json.dumps(everywhere[number : number + 12]))
            (folder / "2_unseen_train.json").write_text(json.dumps(everywhere[:TRAINED_APART]))
            (folder / "2_unseen_test.json").write_text(json.dumps(everywhere[TRAINED_APART:number]))
    return out


@pytest.fixture(scope="module")
def world(out):
    return read_world(Files(out / "scenes" / "compositions"), SETTINGS, out / "features", lambda line: None)


def test_variants_and_what_is_asked_for():
    assert {one.method for one in VARIANTS.values()} == {name for name, one in METHODS.items() if one.composes}
    assert {name.removesuffix(THREE).removesuffix(APART) for name in VARIANTS} == set(CHOSEN)
    for world in ("scenes", "coco_small"):
        for name in VARIANTS:
            config = config_of(
                training_of(name, 0), settings_of(world)
            )  # finetune refuses what a method has no use for
            assert config.optimizer.name == "adam"
    assert training_of("tirg k=3", 1).parts == 3
    assert training_of("tirg k=3", 1).values == CHOSEN["tirg"]
    assert training_of("tirg unseen", 1).setup == UNSEEN
    assert neighbours({"lr": 1e-3, "temperature": 8.0}) == [
        ("lr", 3e-4), ("lr", 1e-3), ("lr", 3e-3), ("temperature", 2.0), ("temperature", 32.0)
    ]  # fmt: skip
    assert neighbours({"lr": LEARNING_RATES[-1]}) == [("lr", lr) for lr in LEARNING_RATES[-2:]]
    assert composed_variants("composed") == list(VARIANTS)
    assert composed_variants("tirg, mpc-mlp") == ["tirg", "tirg k=3", "tirg unseen", "mpc-mlp"]
    assert composed_variants("all") == composed_variants("pcmepp,vse") == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "mpc,tirk"], "no composed method 'tirk' to compare. Did you mean 'tirg'"),
        (["--methods", "composed", "--world", "flickr8k"], "has no composed queries"),
        (["--methods", "composed", "--world", "coco_small"], "--data is missing"),
        (["--methods", "vse", "--world", "coco_small"], "compares no vse"),
        (["--world", "coco_small"], "is for composed queries"),
        (["--methods", "composed", "--data", "x"], "--data has no use with drawn scenes"),
        (["--methods", "composed", "--world", "coco_small", "--judgements", "x"], "--judgements has no use"),
        (["--methods", "vse", "--world", "flickr8k", "--data", "x", "--lists", "y"], "--lists has no use"),
        (["--methods", "composed", "--epochs", "0"], "--epochs 0 is too small"),
    ],
)
def test_refusals(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        claims.main([*argv, "--out", str(tmp_path / "claims")])


def test_the_trunk_sees_pictures_with_all_concepts_and_crops_with_one(world):
    data = world.train[2]
    model = make_model(SETTINGS, world.vocabulary)
    pixels, labels = next(batches(model, data, 8, 2))
    assert pixels.shape[0] == labels.shape[0] == 16
    assert (labels[1::2].sum(1) == 1).all()
    assert set(map(tuple, labels[::2].nonzero().tolist())) >= set(map(tuple, labels[1::2].nonzero().tolist()))
    transform = create_transforms(model).evaluate
    held = [sorted(data.holds[i]) for i in range(len(data))]
    image = next(i for i in range(len(data)) if torch.equal(transform(data.images.open(i)), pixels[0]))
    assert labels[0].nonzero().flatten().tolist() == held[image]


def test_the_trunk_learns(world):
    """What eight pictures and their crops show."""
    data, model = world.train[2], make_model(SETTINGS, world.vocabulary)
    few = tuple(Crops(one.owners[one.owners < 8], one.boxes[one.owners < 8]) for one in data.crops)
    settings = Settings(pictures=200, trunk_batch=8, pixels=32, trunk_lr=5e-3)
    losses = train_trunk(
        model,
        replace(data, tuples=data.tuples[:0], unseen=data.unseen[:0], infeasible=data.infeasible[:0], crops=few),
        settings,
    )
    assert len(losses) == 25
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@pytest.fixture(scope="module")
def whole(world, out):
    """A model that reads pixels, with the trunk that the features come from, and the same model over features."""
    config = config_of(training_of("mpc", 0), SETTINGS)
    short = create(world, SETTINGS, config).eval()
    model = make_model(SETTINGS, world.vocabulary, **METHODS["mpc"].model_options(config)).eval()
    missing, _ = model.load_state_dict(short.state_dict(), strict=False)
    assert {model.image_tower.place(name.removeprefix("image_tower.")).part for name in missing} == {"trunk"}
    model.image_tower.load_state_dict(load_file(out / "features" / "trunk.safetensors"), strict=False)
    return model, short


def test_a_batch_has_the_features_of_what_it_names(world, whole):
    data, model = world.train[2], whole[0]
    transform, tokenizer = create_transforms(model).evaluate, create_tokenizer(model)
    loader = Loader(KeptRows(data, world.kept, tokenizer, 16, seed=3, repeats=2))
    assert loader.steps == 2 * len(data.tuples) // 16
    batch = next(loader.epoch(1, start_step=2))
    for row, numbers in enumerate(batch.part_rows.tolist()):
        concepts = batch.concepts[row].tolist()
        target = int(batch.target_index[row])
        assert set(concepts) <= data.holds[target]
        assert torch.equal(batch.images[row], world.kept.of(target))
        assert concepts == data.tuples[int(batch.example_index[row])].tolist()
        for concept, at in zip(concepts, numbers):
            if at < 0:
                assert torch.equal(batch.tokens[-at - 1], tokenizer([data.concepts[concept]])[0])
    place = next(crop for crop in world.kept.place if crop.box is not None)
    pixels = transform(cropped(data.images.open(place.image), place.box))[None]
    with torch.no_grad():
        expected = world.layout.pack(*model.image_tower.features(pixels))[0]
    torch.testing.assert_close(world.kept.of(*place).float(), expected, rtol=1e-2, atol=1e-2)


def test_kept_features_measure_what_pixels_do(world, whole):
    model, short = whole
    data, tokenizer = world.test[2].data, create_tokenizer(model)
    embedder = Embedder(model, tokenizer, create_transforms(model).evaluate)
    queries = world.test[2].queries[SEEN]
    expected = embed_queries(embedder, data, queries)
    found = embed(short, tokenizer, world.test_kept, queries)
    torch.testing.assert_close(found.composed.gaussian.mean, expected.composed.gaussian.mean, rtol=0, atol=5e-3)
    torch.testing.assert_close(found.parts.mean, expected.parts.mean, rtol=0, atol=5e-3)
    assert found.parts.mean.shape == (len(queries), 2, 16)
    measured = retrieval(short, tokenizer, world.test_kept, world.test[2], SEEN)
    of_pixels = measure_composed(embedder.images(data.images), data, expected)
    for kind, one in of_pixels.items():
        assert measured[kind]["queries"] == one["queries"]
        assert measured[kind]["r@10"] == pytest.approx(one["r@10"], abs=0.13)  # float16 may swap near neighbours


def test_pairs_of_the_test_are_none_of_the_training(world):
    asked = training_of("mpc unseen", 0)
    trained, tested = world.trained(asked), world.apart.test
    assert len(trained.tuples) == TRAINED_APART
    assert world.validated(asked).data.tuples.tolist() == trained.tuples.tolist()
    assert not {tuple(one) for one in trained.tuples.tolist()} & {q.concepts for q in tested.queries[SEEN]}
    assert repeats_of(world, SETTINGS, asked) == len(world.train[2].tuples) // TRAINED_APART
    assert repeats_of(world, SETTINGS, training_of("mpc", 0)) == SETTINGS.repeats
    assert world.trained(training_of("mpc", 0)) is world.train[2]


def test_chance_is_that_of_random_rankings(world):
    asked, generator = world.test[2], torch.Generator().manual_seed(0)
    expected, n = chance(asked), len(asked.data)
    found = {name: [] for name in expected}
    for query in asked.queries[SEEN] * 40:
        right = set(asked.data.targets(query.concepts).tolist())
        order = torch.randperm(n, generator=generator).tolist()
        for k in (5, 10):
            found[f"r@{k}"].append(bool(right & set(order[:k])))
        found["r_precision"].append(len(right & set(order[: len(right)])) / len(right))
    for name, values in found.items():
        assert expected[name] == pytest.approx(sum(values) / len(values), abs=0.04)


def test_rarity_is_the_share_of_pairs_of_combinations_in_the_right_order(world):
    train, asked = world.train[2], world.test[2]
    images = {name: len(train.targets([index])) for index, name in enumerate(train.concepts)}

    def rarity(query) -> float:
        return -sum(math.log(1 + images[asked.data.concepts[concept]]) for concept in query.concepts)

    low, high = ([rarity(q) for q in asked.queries[which]] for which in (UNSEEN, INFEASIBLE))
    right = sum((b > a) + (b == a) / 2 for a in low for b in high) / (len(low) * len(high))
    assert rarity_auc(world, asked.queries[UNSEEN], asked.queries[INFEASIBLE]) == pytest.approx(right, abs=1e-9)


def test_a_kind_with_few_queries_is_left_out():
    """Of the photographs' seen pairs four queries are of images alone."""
    numbers = {"images": {"r@5": 0.25, "queries": 4}, "mixed": {"r@5": 0.4, "queries": 10},
               "texts": {"r@5": 0.2, "queries": 900}}  # fmt: skip
    one = {"retrieval": {"seen 2": numbers}}
    assert findings.of_kind("seen 2", "images", "r@5")(one) is None
    assert findings.of_kind("seen 2", "mixed", "r@5")(one) == 0.4
    assert average("seen 2", "r@5")(one) == pytest.approx(0.3)
    assert average("seen 3", "r@5")(one) is None


@pytest.fixture(scope="module")
def study(out, world):
    study = Composed(SETTINGS, variants=NAMES)
    return study, claims.run(study, out, n_seeds=2, workers=1)


def test_trains_measures_and_reports(study, out):
    study, content = study
    assert [one["name"] for one in content["trainings"]] == NAMES * 2
    first, point = content["trainings"][0], content["trainings"][2]
    assert set(first["retrieval"]) == {"seen 2", "unseen 2", "seen 3", "seen 4"}
    for one in first["retrieval"].values():
        assert all(0 <= of["r_precision"] <= of["queries"] for of in one.values())
    assert set(first["feasibility"]) > set(findings.SCORES)
    assert set(point["feasibility"]) == {"distance", "rarity"}
    assert set(first["density"]) == set(first["retrieval"])
    assert "density" not in point
    titles = [one["title"][:2] for one in content["claims"]]
    assert titles == ["1.", "3.", "5.", "6.", "8."]
    table = content["claims"][0]
    kinds = [one["retrieval"]["seen 2"]["texts"]["r@5"] for one in content["trainings"] if one["name"] == "mpc"]
    assert [row[0] for row in table["rows"]] == ["TIRG", "PCME + addition", "MPC", "MPC, ranked by its density"]
    assert table["rows"][-2][7].startswith(f"{100 * sum(kinds) / 2:.1f} ±")
    dense = [one["density"]["seen 2"]["texts"]["r@5"] for one in content["trainings"] if one["name"] == "mpc"]
    assert table["rows"][-1][7].startswith(f"{100 * sum(dense) / 2:.1f} ±")
    assert len(table["comparisons"]) == 12
    apart = content["claims"][1]
    titles = [row[0] for row in apart["rows"] if not row[0].endswith(", ranked by its density")]
    assert titles == [VARIANTS[name].title for name in (*NAMES[4:2:-1], *NAMES[2::-1])]
    assert [row[0] for row in apart["rows"] if row[0] not in titles] == [
        f"{VARIANTS[name].title}, ranked by its density" for name in ("mpc unseen", "mpc")
    ]
    mean = (
        sum(average("apart 2", "r_precision")(one) for one in content["trainings"] if one["name"] == "mpc unseen") / 2
    )
    assert apart["rows"][1][3].startswith(f"{100 * mean:.1f} ±")
    assert len(apart["comparisons"]) == 2 * (2 + 4)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Feasible or not" in page
    assert "R@10" in page


def test_a_second_start_trains_nothing(study, out):
    study, content = study
    before = (out / "features" / "train.safetensors").stat().st_mtime_ns
    assert claims.run(study, out, n_seeds=2, workers=1)["trainings"] == content["trainings"]
    assert claims.run(study, out, n_seeds=2, report_only=True)["claims"] == content["claims"]
    assert (out / "features" / "train.safetensors").stat().st_mtime_ns == before
    assert Archive(out, study).read(training_of("tirg", 1)) is not None


def test_values_are_chosen_on_validation_images(out, capsys):
    Composed(SETTINGS, variants=["tirg"]).choose(out, workers=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("choose")]
    assert [line.split(":")[0] for line in lines] == [
        f"choose tirg {what} {at:g}" for what, at in neighbours(CHOSEN["tirg"])
    ]
    assert all(float(line.split(": ")[1].split()[0]) >= 0 for line in lines)


def test_another_order_of_crops_computes_features_anew(world, out):
    """Features are found by a digest of what they are of."""
    told = []
    read_world(Files(out / "scenes" / "compositions"), SETTINGS, out / "features", told.append)
    assert not any("features" in line for line in told)
    more = replace(SETTINGS, test_queries=40)
    read_world(Files(out / "scenes" / "compositions"), more, out / "features", told.append)
    assert [line for line in told if "features of" in line] == [line for line in told if "test.safetensors" in line]
    assert any("test.safetensors" in line for line in told)
