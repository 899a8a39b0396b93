"""The best checkpoint by a metric, of runs as the command is typed."""

import json

import pytest
import torch
from safetensors.torch import load_file

from probemb import load_model
from probemb.runs.best import NAME as BEST
from tests.pretrain.test_run import metrics, start


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_survives_a_resumption(scenes, tmp_path):
    """Evaluated at steps 1 to 6 with a rate that spoils the weights, and saved at each third."""
    options = {"data.train": scenes / "train", "evaluate.pairs": f"v={scenes}/val", "evaluate.every_samples": 16}
    options |= {"evaluate.best": "v/rsum", "save-every": 3, "keep-checkpoints": 1, "optimizer.lr": 0.02}
    runs = {name: tmp_path / name for name in ("whole", "parts")}
    done = start({**options, "out": runs["whole"]})
    assert done.returncode == 0, done.stderr
    for stop in (3, 0):
        part = start({**options, "out": runs["parts"], "stop-at-step": stop}, "--resume")
        assert part.returncode == 0, part.stderr
        if stop:  # as if killed while model-best/ was being written
            (runs["parts"] / "model-best" / ".step").write_text("0\n")
            (runs["parts"] / "model-best" / "model.safetensors").write_bytes(b"half")
    for run, said in ((runs["whole"], done.stdout), (runs["parts"], part.stdout)):
        values = {line["step"]: line["v/rsum"] for line in metrics(run) if "v/rsum" in line}
        assert sorted(values) == [1, 2, 3, 4, 5, 6]
        best = min(values, key=lambda step: (-values[step], step))
        so_far = [step for step in values if values[step] > max([-1.0, *(values[s] for s in range(1, step))])]
        assert [line["step"] for line in metrics(run) if line.get("is_best")] == so_far
        assert [one["step"] for one in json.loads((run / "best.json").read_text())["steps"]][-1] == best == so_far[-1]
        kept = {path.name for path in (run / "checkpoints").iterdir()}
        assert kept == {"step-6", f"step-{best}"}
        weights = load_file(run / "checkpoints" / f"step-{best}" / "weights.safetensors")
        for name, value in load_model(run / "model-best").model.state_dict().items():
            assert torch.equal(value, weights.get(f"model.{name}", value)), name
        assert f"best    step {best}, v/rsum {values[best]:.4g}: {run}/checkpoints/step-{best}" in said
    assert best <= 3  # so that it was restored when the second part began
    assert (runs["whole"] / "best.json").read_text() == (runs["parts"] / "best.json").read_text()


def test_a_finished_run_is_evaluated_on_a_further_set(scenes, tmp_path):
    run = tmp_path / "run"
    options = {"data.train": scenes / "train", "out": run, "samples": 32, "evaluate.pairs": f"a={scenes}/val"}
    assert start(options).returncode == 0
    options |= {"evaluate.pairs": f'["b={scenes}/val", "a={scenes}/val"]', "evaluate.best": "b/rsum"}
    options |= {"evaluate.every_samples": 16}
    for _ in range(2):
        done = start(options, "--resume")
        assert done.returncode == 0, done.stderr
        assert [len([line for line in metrics(run) if f"{name}/rsum" in line]) for name in "ab"] == [1, 1]
        assert json.loads((run / BEST).read_text())["steps"][-1]["step"] == 2
        assert (run / "model-best" / "model.safetensors").exists()
    assert "is finished: 2 of 2 steps" in done.stdout
