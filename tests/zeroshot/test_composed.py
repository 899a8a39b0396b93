"""`python -m zeroshot.composed` on drawn scenes: its numbers against a plain loop, page, rivals and refusals."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from probemb.data.compositions.find import find_compositions
from probemb.data.image_loader import cropped
from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model
from tests.data.compositions.fashion import write_fashion200k
from tests.finetune.runs import run_here
from tools.make_scenes import Plan, make
from zeroshot.composed import main

QUERIES = 32  # of each set


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    out = tmp_path_factory.mktemp("composed") / "scenes"
    make(Plan(train=0, val=0, classes_images=0, size=32, compositions=1200, shard_size=600), out, workers=1)
    folder = out / "compositions"
    seen, unseen = folder / "2_cat_combinations.json", folder / "2_cat_combinations_zero_shot.json"
    rows = json.loads(seen.read_text())  # all feasible pairs, in a world as small as this: 40 are not trained on
    seen.write_text(json.dumps(rows[40:]))
    unseen.write_text(json.dumps(rows[:40]))
    return folder


@pytest.fixture(scope="module")
def run(drawn, tmp_path_factory):
    """A short training of MPC."""
    out = tmp_path_factory.mktemp("runs") / "mpc"
    options = {
        "method": "mpc", "data.path": drawn, "out": out, "model.name": "scenes-cnn-gru", "model.head": "clip",
        "model.embed_dim": "null", "epochs": 1, "swa-epochs": 0, "batch-size": 64, "optimizer.decay-epochs": 0,
        "optimizer.freeze-epochs": 0, "compose.queries": 20, "augment.cutout": 0, "augment.word_dropping": 0,
    }  # fmt: skip
    assert run_here(options) == 0
    return out


def command(model, data, out, *options):
    words = ["--model", str(model), "--data", str(data), "--out", str(out), "--workers", "0", *options]
    return main([*words, *(() if "--queries" in options else ("--queries", str(QUERIES)))])


@pytest.fixture(scope="module")
def measured(run, drawn, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    assert command(run, drawn, out, "--k", "2,3") == 0  # rankings: what the method learns by, beside the cosine
    return out, json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)


class Plain:
    """The model, an image or text at a time, and the composition of two or more parts in double precision."""

    def __init__(self, run, data):
        self.model, self.tokenizer, transforms = load_model(run)
        self.model.eval()
        self.transform, self.data = transforms.evaluate, data
        self.gallery = [self.image(data.images.open(i)) for i in range(len(data))]

    def image(self, picture):
        with torch.no_grad():
            return self.normal(self.model.encode_image(self.transform(picture)[None]))

    def text(self, text):
        with torch.no_grad():
            return self.normal(self.model.encode_text(self.tokenizer([text])))

    def normal(self, gaussian):
        return gaussian.mean[0].double(), gaussian.log_var[0].double().exp()

    def part(self, part):
        if not part.is_image:
            return self.text(part.text)
        return self.image(cropped(self.data.images.open(part.image), part.box))

    def composed(self, query):
        """Mean, variance and log-normaliser."""
        parts, log_z = [self.part(one) for one in query.parts], 0.0
        mean, var = parts[0]
        for other, other_var in parts[1:]:
            log_z += float(torch.distributions.Normal(mean, (var + other_var).sqrt()).log_prob(other).sum())
            mean = (mean / var + other / other_var) / (1 / var + 1 / other_var)
            var = 1 / (1 / var + 1 / other_var)
        return mean, var, log_z

    def scores(self, mean, var, ranking):
        if ranking == "cosine":
            return [float(F.cosine_similarity(mean, one, dim=0)) for one, _ in self.gallery]
        normal = torch.distributions.Normal(mean, var.sqrt())
        return [float((normal.log_prob(one) - 0.5 * one_var / var).sum()) for one, one_var in self.gallery]


def test_the_numbers_equal_a_plain_loop(measured, run, drawn):
    _, results = measured
    scenes = find_compositions(drawn, "test", 2)
    sets = {"seen": scenes.tuples, "unseen": scenes.unseen}
    plain = Plain(run, scenes)
    for name, tuples in sets.items():
        queries = scenes.sampled_queries(min(QUERIES, 10 * len(tuples)), 0, tuples)
        composed = [plain.composed(query) for query in queries]
        for ranking in ("cosine", "density"):
            [row] = [
                one for one in results["rows"]
                if (one["k"], one["combinations"], one["ranking"]) == (2, name, ranking)
            ]  # fmt: skip
            found = {"images": [], "mixed": [], "texts": []}
            for query, (mean, var, _) in zip(queries, composed):
                scores = plain.scores(mean, var, ranking)
                order = sorted(range(len(scores)), key=lambda i: -scores[i])
                right = set(query.concepts) <= scenes.holds[order[0]]
                hits = [set(query.concepts) <= scenes.holds[i] for i in order]
                total = sum(hits)
                assert hits[0] == right
                assert total
                found[query.kind].append((any(hits[:5]), any(hits[:10]), sum(hits[:total]) / total))
            found["all"] = [one for some in list(found.values()) for one in some]
            for kind, some in found.items():
                one = row["kinds"][kind]
                assert one["queries"] == len(some)
                for place, metric in enumerate(("r@5", "r@10", "r_precision")):
                    mean = sum(values[place] for values in some) / len(some)
                    assert one[metric]["value"] == pytest.approx(mean, abs=1e-9), (name, ranking, kind, metric)


def test_feasibility_equals_a_plain_loop(measured, run, drawn):
    _, results = measured
    data = find_compositions(drawn, "test", 2)
    plain, training = Plain(run, data), find_compositions(drawn, "train", 2)
    assert training.concepts == data.concepts
    values = {}
    for name, tuples in (("seen", data.tuples), ("unseen", data.unseen), ("infeasible", data.infeasible)):
        for query in data.sampled_queries(min(QUERIES, 10 * len(tuples)), 0, tuples):
            _, var, log_z = plain.composed(query)
            values.setdefault(("normaliser", name, query.kind), []).append(-log_z)
            values.setdefault(("variance", name, query.kind), []).append(float(var.sum()))
            held = [sum(concept in training.holds[i] for i in range(len(training))) for concept in query.concepts]
            values.setdefault(("rarity", name, query.kind), []).append(-sum(math.log(1 + count) for count in held))
    rows = {(row["score"], row["feasible"]): row for row in results["feasibility"]["rows"]}
    assert {feasible for _, feasible in rows} == {"seen", "unseen"}
    assert results["feasibility"]["infeasible"]["queries"] == QUERIES
    for score in ("normaliser", "variance", "rarity"):
        for name in ("seen", "unseen"):
            found, areas = rows[score, name]["kinds"], []
            for kind in ("images", "mixed", "texts"):
                both = values[score, name, kind], values[score, "infeasible", kind]
                area = sum((b > a) + (b == a) / 2 for a in both[0] for b in both[1]) / math.prod(map(len, both))
                assert found[kind]["value"] == pytest.approx(area, abs=4e-3)  # a rounded tie is half a pair
                areas += [area] * min(map(len, both))
            assert found["all"]["value"] == pytest.approx(sum(areas) / len(areas), abs=4e-3)


def test_longer_queries_count_as_unseen_and_a_random_order_is_beside(measured):
    _, results = measured
    assert results["trained"] == {"k": 2, "setup": "seen", "seed": 0, "known": True}
    assert [(row["k"], row["combinations"]) for row in results["rows"][::2]] == [
        (2, "seen"), (2, "unseen"), (3, "unseen"),
    ]  # fmt: skip
    for row in results["rows"]:
        assert set(row["kinds"]) == {"all", "images", "mixed", "texts"}
        one = row["kinds"]["all"]
        assert one["guessing"]["r_precision"] == pytest.approx(one["targets"] / results["images"])
        assert one["guessing"]["r@5"] < one["guessing"]["r@10"] < 1


def test_the_page(measured):
    out, _ = measured
    page = (out / "report.html").read_text()
    for words in ("By the number of parts", "Feasibility", "k = 3, unseen", "correct", "log-normaliser"):
        assert words in page
    assert 'src="http' not in page
    assert page.count('class="query"') == 3 * 3 * 3
    assert page.count('src="data:image/jpeg') > 6 * 27
    for name in ("parts", "roc-seen", "roc-unseen"):
        assert (out / "figures" / f"{name}.pdf").is_file()


def test_pairs_that_the_training_left_out(run, drawn, tmp_path):
    assert command(run, drawn, tmp_path, "--setup", "unseen", "--rankings", "density") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["ranking"] for row in results["rows"]} == {"density"}
    assert [row["combinations"] for row in results["rows"]] == ["seen", "unseen"]
    training = find_compositions(drawn, "train", setup="unseen")
    assert results["rows"][0]["number"] <= len(training.tuples)
    assert results["rows"][1]["number"] <= len(find_compositions(drawn, "test", setup="unseen").tuples)


def test_longer_queries_after_a_training_that_left_pairs_out(run, drawn, tmp_path):
    assert command(run, drawn, tmp_path, "--setup", "unseen", "--k", "2,3", "--rankings", "density") == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    asked = [(row["k"], row["combinations"]) for row in rows if row["combinations"] != "infeasible"]
    assert asked == [(2, "seen"), (2, "unseen"), (3, "unseen")]


@pytest.mark.parametrize("composer", ["tirg", "addition"])
def test_rivals(composer, drawn, tmp_path, capsys):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer=composer), tmp_path / "model")
    assert command(tmp_path / "model", drawn, tmp_path / "out", "--k", "2,3") == 0
    results, told = json.loads((tmp_path / "out" / "results.json").read_text()), capsys.readouterr().out
    scores = {row["score"] for row in results["feasibility"]["rows"]}
    assert scores == {"rarity", "distance", *(() if composer == "tirg" else ("variance", "log-variance"))}
    assert results["rows"][-1]["k"] == 3
    assert {row["ranking"] for row in results["rows"]} == {"cosine"}  # it was not trained by a density
    points = " ".join(told.split())
    assert ("'tirg' composes points" in points) == (composer == "tirg")
    assert "no config.yaml" in points
    if composer == "tirg":
        with pytest.raises(UserError, match="no density to rank by"):
            command(tmp_path / "model", drawn, tmp_path / "out", "--rankings", "density")


def test_changes_of_an_attribute_leave_the_query_s_image_out(tmp_path):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer="addition"), tmp_path / "model")
    (tmp_path / "data").mkdir()
    data = write_fashion200k(tmp_path / "data")
    assert command(tmp_path / "model", data, tmp_path / "out") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    [row] = results["rows"]
    assert (row["combinations"], row["published"], row["metrics"][:3]) == ("changes", True, ["r@1", "r@10", "r@50"])
    assert set(row["kinds"]) == {"all", "mixed"}
    assert row["kinds"]["mixed"]["queries"] == 2
    assert row["kinds"]["mixed"]["r@10"]["value"] == 1  # of four images
    assert results["feasibility"] is None
    assert "own image is left out" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(UserError, match="changes of an attribute, and --k is 3"):
        command(tmp_path / "model", data, tmp_path / "out", "--k", "3")


REFUSED = {
    "no data": (["--model", "x"], "--data is missing"),
    "no model": (["--data", "x"], "--model is missing"),
    "unknown ranking": (["--model", "x", "--data", "y", "--rankings", "cosinus"], "no ranking 'cosinus'"),
    "one part": (["--model", "x", "--data", "y", "--k", "1,2"], "2 to 10 parts"),
    "no number": (["--model", "x", "--data", "y", "--k", "two"], "--k is 'two'"),
    "twice": (["--model", "x", "--data", "y", "--k", "2,"], "--k is '2,'"),
    "nothing there": (["--model", "x", "--data", "/nowhere"], "does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, what = REFUSED[case]
    with pytest.raises(UserError, match=what):
        main(options)


def test_a_model_without_composer_and_files_of_others_are_refused(run_folder, drawn, tmp_path):
    with pytest.raises(UserError, match="not trained to compose"):
        command(run_folder, drawn, tmp_path / "out")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by this command"):
        command(run_folder, drawn, tmp_path)


def test_a_damaged_run_is_refused(run, drawn, tmp_path):
    (tmp_path / "model").symlink_to(run / "model")
    for content in ("compose: {seed: soon}", "compose: {setup: other}", "[1", "- 1"):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(UserError, match=r"config\.yaml"):
            command(tmp_path, drawn, tmp_path / "out")


def test_help_and_exit_code():
    words = [sys.executable, "-m", "zeroshot.composed"]
    assert "--rankings" in subprocess.run([*words, "--help"], capture_output=True, text=True, check=True).stdout
    assert subprocess.run([*words, "--model", "x"], capture_output=True, text=True).returncode == 2
