"""Methods that read regions, on those of some of Flickr8k's photographs as `tools.write_regions` makes them."""

import math
import sys
import tarfile

import pytest
import torch

import tools.build_vocabulary
from probemb import load_model
from tests.finetune.runs import ONE_EPOCH, metrics, run_here
from tools.write_regions import main

PAIRS, EACH = 24, 2  # images of a split, and files of each


@pytest.fixture(scope="module")
def regions(shared_data, tmp_path_factory):
    torch.set_num_threads(1)
    weights = shared_data("pretrained") / "tf_efficientnet_lite0.safetensors"
    folder = tmp_path_factory.mktemp("photographs")
    with tarfile.open(shared_data("flickr8k") / "val-00000.tar") as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()[: 2 * PAIRS * EACH]]
    for number, split in enumerate(("train", "val")):
        with tarfile.open(folder / f"{split}-00000.tar", "w") as tar:
            for member, data in members[number * PAIRS * EACH :][: PAIRS * EACH]:
                (aside := folder / "aside").write_bytes(data)
                tar.add(aside, member.name)
    aside.unlink()
    out = folder / "regions"
    with pytest.MonkeyPatch.context() as patch:
        words = ["--data", str(folder), "--split", "train", "val", "--model", "tf_efficientnet_lite0"]
        words += ["--weights", str(weights), "--image-size", "128", "--grid", "4", "--workers", "0", "--out", str(out)]
        patch.setattr(sys, "argv", ["write_regions", *words])
        assert main() == 0
        vocabulary = ["--split", "train", "--min-count", "2", "--out", str(out / "vocabulary.txt")]
        patch.setattr(sys, "argv", ["build_vocabulary", str(folder), *vocabulary])
        assert tools.build_vocabulary.main() == 0
    return out


@pytest.mark.parametrize(
    ("method", "model", "head"),
    [
        ("vsrn", "vsrn-grid-gru", "clip"),
        ("prob-vsrn", "vsrn-grid-gru", "clip"),
        ("scan", "scan-grid-gru", "average"),
        ("jwae-scan", "scan-grid-gru", "average"),
    ],
)
def test_a_method_trains_on_regions_of_photographs(method, model, head, regions, tmp_path):
    decoder = {"loss.hidden": 8, "loss.word_width": 8} if method in ("vsrn", "jwae-scan") else {}
    options = {"method": method, "data.path": regions, "out": tmp_path / "run", "model.name": model, **decoder}
    options |= {"model.head": head, "model.embed_dim": "null", "batch-size": 40, "optimizer.freeze-epochs": 0}
    assert run_here({**options, **ONE_EPOCH}) == 0
    trained = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in trained)
    assert load_model(tmp_path / "run").model.probabilistic == (method == "prob-vsrn")
