"""A study's statistics against independent truths, and its runs: resumed, changed, failing."""

import itertools
import json

import pandas as pd
import pytest
import scipy.stats
import yaml

from probemb.errors import UserError
from tools import study

COUNT = "python -c \"open('{shared}', 'a').write('{seed}')\""
WRITE = (  # a row's JSON: the seed and the row's own number
    "python -c \"import json, os; os.makedirs('{out}'); open('{out}/r.json', 'w').write("
    "json.dumps({'rows': [{'k': 1, 'x': 0}, {'k': 2, 'x': {value} + {seed} * {factor}}]}))\""
)


@pytest.fixture
def run(tmp_path, capsys):
    """run(*options, commands=..., **rows) -> what is printed; the study is in tmp_path."""

    def call(*options: str, **changes) -> str:
        content = {
            "variables": {"factor": None, "command": WRITE},
            "prepare": [COUNT],
            "commands": ["{command}"],
            "rows": {"a b": {"title": "row A", "value": 1}, "c": {"value": 3}},
            "numbers": {"x": {"read": "r.json: rows[k=2].x", "factor": 10}},
            "comparisons": [{"title": "family", "numbers": ["x"], "pairs": [["c", "a b"], ["c", 0]]}],
        }
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(content | changes))
        study.main([str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"), "--set", "factor=2", *options])
        return capsys.readouterr().out

    return call


def test_paired_differences_have_students_interval_and_p():
    a, b = scipy.stats.norm.rvs(size=(2, 7), random_state=7)
    found, truth = study.paired(list(a - b)), scipy.stats.ttest_rel(a, b)
    interval = truth.confidence_interval(0.95)
    assert found["mean"] == pytest.approx((a - b).mean())
    assert (found["low"], found["high"], found["p"]) == pytest.approx((interval.low, interval.high, truth.pvalue))


def test_holm_is_the_closed_test_of_bonferroni():
    for ps in itertools.product((0.004, 0.012, 0.02, 0.04, 0.3), repeat=4):
        closed = [
            all(
                min(ps[j] for j in some) <= study.LEVEL / len(some)
                for size in range(1, 5)
                for some in itertools.combinations(range(4), size)
                if i in some
            )
            for i in range(4)
        ]
        assert study.holm(ps) == closed
    assert study.holm([float("nan"), 0.04]) == [False, True]


def test_finished_rows_are_kept_and_a_wider_study_runs_the_rest(run, tmp_path):
    text = run("--seeds", "2", "--workers", "2")
    assert "row A" in text
    assert "+20.00" in text  # (3 + 2s) - (1 + 2s), times its factor
    first = (tmp_path / "out/finished/c-seed-1.json").read_bytes()
    run("--seeds", "3", "--only", "c")
    assert sorted((tmp_path / "out/shared").read_text()) == ["0", "1", "2"]  # a preparation of every seed, once
    assert (tmp_path / "out/finished/c-seed-1.json").read_bytes() == first
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [(one["seed"], one["x"]) for one in results["rows"]] == [(0, 3), (1, 5), (2, 7)]
    assert results["rows"][0]["commands"][0].startswith("python -c")


def test_a_command_reads_with_workers_as_if_started_alone(run, tmp_path, run_folder, captioned):
    embed = f"python -m tools.embed --model {run_folder} --data {captioned} --out {{out}} --workers 1"
    run("--seeds", "1", commands=[embed], prepare=[], rows={"a": {}}, numbers={}, comparisons=[])
    assert (tmp_path / "out/rows/a-seed-0/embeddings.json").is_file()


def test_a_changed_command_line_is_refused_and_run_again_when_asked(run, tmp_path):
    run("--seeds", "1")
    changed = {"rows": {"a b": {"value": 1}, "c": {"value": 4}}}
    with pytest.raises(UserError, match="c-seed-0 is finished with another command line"):
        run("--seeds", "1", **changed)
    run("--seeds", "1", "--rerun", **changed)
    table = pd.read_csv(tmp_path / "out/results.csv", comment="#").set_index("row")
    assert table.x.to_dict() == {"a b": 1, "c": 4}
