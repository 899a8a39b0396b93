"""The comparison of methods: the commands themselves on a few scenes, and what its options refuse."""

import json
import subprocess
import sys
import time

import pytest
import yaml

from finetune.methods.registry import METHODS
from probemb.errors import UserError
from tools.claims import command as claims
from tools.claims.flickr8k.world import Files
from tools.claims.methods import findings
from tools.claims.methods.study import Methods, Settings
from tools.claims.methods.variants import PAPERS, VARIANTS, chosen_variants, rankings_of, training_of
from tools.claims.queue import Archive

NOTHING = Files(None, None, None, None, None)


def test_variants_name_methods_of_finetune_and_papers():
    assert {one.paper for one in VARIANTS.values()} <= set(PAPERS)
    assert {one.method for one in VARIANTS.values()} <= set(METHODS)
    assert {name for pairs in findings.SAYS.values() for pair in pairs for name in pair} <= set(VARIANTS)
    assert chosen_variants("all") == list(VARIANTS)
    assert chosen_variants("vse, infonce,vse") == ["vse", "infonce"]
    assert rankings_of("pcmepp-clip") == ["csd", "mean"]
    assert rankings_of("vse") == rankings_of("jwae-mh") == ["mean"]
    assert rankings_of("pcme") == ["match-probability", "csd", "mean"]
    assert rankings_of("order") == ["order", "mean"]
    assert rankings_of("prob-vsepp") == ["wasserstein2", "csd", "mean"]
    assert rankings_of("prob-vsepp KL") == ["kl", "csd", "mean"]


def test_no_claim_compares_regions_with_pixels():  # on scenes the two do not start alike
    for better, worse in (pair for pairs in findings.SAYS.values() for pair in pairs):
        assert VARIANTS[better].regions == VARIANTS[worse].regions


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "vze"], "no method 'vze' to compare. Did you mean 'vse'"),
        (["--methods", "compsed"], "no method 'compsed' to compare. Did you mean 'composed'"),
        (["--methods", "vse", "--world", "ambiguity"], "no use with --world ambiguity"),
        (["--methods", "vse", "--world", "flickr8k"], "--data is missing"),
        (["--methods", "vse", "--world", "flickr8k", "--data", "x", "--coco", "y"], "--coco has no use"),
        (["--methods", "vse", "--epochs", "0"], "--epochs 0 is too small"),
        (["--epochs", "3"], "--epochs has no use without --methods"),
    ],
)
def test_refusals(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        claims.main([*argv, "--out", str(tmp_path / "claims")])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Of what reads pixels, and of what reads regions."""
    study = Methods(
        NOTHING, ["pcmepp-clip", "prob-vsrn"], Settings("scenes", epochs=1, batch_size=16, scenes=32, test_scenes=24)
    )
    out = tmp_path_factory.mktemp("methods")
    return study, out, claims.run(study, out, n_seeds=1, workers=1)


def test_trains_measures_and_reports(study):
    study, out, content = study
    one, other = content["trainings"]
    assert (one["ranking"], other["ranking"]) == ("csd", "wasserstein2")
    for found in (one, other):
        assert len(found["validation"]) == 1
        for positives in (findings.OWN, findings.TRUE):
            assert 0 <= found["retrieval"][positives]["t2i"]["map_at_r"] <= 1
    results = json.loads((out / "measured" / "pcmepp-clip-seed-0" / "results.json").read_text())
    assert one["retrieval"][findings.OWN]["rsum"] == results["rows"][0]["rsum"]
    assert one["ambiguity"] == results["uncertainty"]["ambiguity_spearman"]
    (table,) = content["claims"]
    assert [row[0] for row in table["rows"]] == ["match and CLIP loss, CSD", "VSRN, 2-Wasserstein"]
    logs = [(out / "logs" / f"{name}-seed-0.log").read_text() for name in ("pcmepp-clip", "prob-vsrn")]
    assert f"from {out / 'start'}" in logs[0]
    assert "from random weights" in logs[1]
    assert "All methods" in (out / "report.html").read_text(encoding="utf-8")


def test_a_second_start_trains_nothing(study):
    study, out, content = study
    log = out / "runs" / "pcmepp-clip-seed-0" / "metrics.jsonl"
    before = log.stat().st_mtime_ns
    assert claims.run(study, out, n_seeds=1, workers=1)["trainings"] == content["trainings"]
    assert log.stat().st_mtime_ns == before
    assert Archive(out, study).read(training_of("pcmepp-clip", 0)) is not None


def test_rates_are_compared_on_validation_images(study, capsys, monkeypatch):
    study, out, _ = study
    monkeypatch.setattr("tools.claims.methods.study.LEARNING_RATES", (1e-5, 2e-3))
    monkeypatch.setattr(study, "variants", ["prob-vsrn"])
    study.choose(out, workers=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("choose")]
    assert [line.partition(":")[0] for line in lines] == ["choose prob-vsrn lr 1e-05", "choose prob-vsrn lr 0.002"]
    configs = [yaml.safe_load(path.read_text()) for path in sorted((out / "runs").glob("choose-*/config.yaml"))]
    assert [(one["optimizer"]["lr"], one["seed"]) for one in configs] == [(0.002, 1000), (1e-5, 1000)]
    assert not (out / "measured" / "choose-prob-vsrn-lr-0.002-seed-1000").exists()


def test_steps_behind_which_a_training_resumes_are_not_waited_for(study):
    study, out, _ = study
    archive, run = Archive(out, study), out / "runs" / "pcmepp-clip-seed-0"
    last = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    one = training_of("pcmepp-clip", 0)
    assert study.steps_before(one, archive) == last * study.step_cost(one) > 0
    assert study.steps_before(training_of("vse", 0), archive) == 0


def test_a_training_that_fails_says_where_to_read(tmp_path):
    study = Methods(NOTHING, ["vse"], Settings("scenes", epochs=1, batch_size=5000, scenes=32, test_scenes=24))
    with pytest.raises(UserError, match=r"vse, seed 0, ended with code 2: error: .*5000.* Use ") as error:
        claims.run(study, tmp_path / "out", n_seeds=1, workers=1)
    assert "logs" in error.value.remedy


def test_a_killed_command_leaves_no_training_behind(tmp_path):
    """Its training saves and ends, so that the next start does not meet it."""
    code = (
        "import sys; from pathlib import Path; from tools.claims import command; "
        "from tools.claims.flickr8k.world import Files; from tools.claims.methods.study import Methods, Settings; "
        "settings = Settings('scenes', epochs=500, batch_size=8, scenes=32, test_scenes=24); "
        "study = Methods(Files(None, None, None, None, None), ['vse'], settings); "
        "command.run(study, Path(sys.argv[1]), n_seeds=1, workers=1)"
    )
    command = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL)
    log = tmp_path / "logs" / "vse-seed-0.log"
    try:
        wait_for(lambda: log.is_file() and "step " in log.read_text(), 120)
    finally:
        command.kill()
        command.wait()
    wait_for(lambda: "stopped by SIGTERM" in log.read_text(), 60)


def wait_for(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)
