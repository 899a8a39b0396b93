"""Data that does not fit, through the whole command: named at once, with a remedy, exit code 2, nothing written."""

import pickle
import shutil

import numpy as np
import pytest
import torch

from probemb.cli.command import run_command
from tests.finetune.region_files import write_regions
from tests.finetune.runs import run_here


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    return write_regions(tmp_path_factory.mktemp("regions"))


class Trap:
    def __reduce__(self):
        return exec, ("raise RuntimeError('a pickle was executed')",)


def fewer_rows(folder):
    np.save(folder / "train_ims.npy", np.load(folder / "train_ims.npy")[:-1])


def other_captions(folder):
    shutil.copy(folder / "dev_caps.txt", folder / "train_caps.txt")


def cut_off(folder):
    content = (folder / "train_ims.npy").read_bytes()
    (folder / "train_ims.npy").write_bytes(content[:-1000])


def pickled(folder):
    (folder / "train_ims.npy").write_bytes(pickle.dumps(Trap()))


def objects(folder):
    np.save(folder / "train_ims.npy", np.array([[[Trap()]]], object), allow_pickle=True)


def pickled_ids(folder):
    np.save(folder / "train_ids.npy", np.array([Trap()] * 16, object), allow_pickle=True)


def other_vocabulary(folder):
    (folder / "vocabulary.txt").write_text("photograph\t9\nof\t8\nred\t7\n")


def short_vectors(folder):
    (folder / "vectors.txt").write_text("".join(f"{word} 0.5 0.25\n" for word in ("red", "green")))


def uneven_vectors(folder):
    (folder / "vectors.txt").write_text("red 0.5 0.25\ngreen 0.5\n")


def nothing(folder):
    pass


VECTORS = {"model.word-vectors": "vectors.txt"}
VSRN = {"method": "vsrn", "model.name": "vsrn-scenes-gru", "model.embed_dim": "null", "model.head": "clip"}
CASES = {
    "rows": (fewer_rows, {}, "has 15 rows, but its captions are of 16 images", "one row for each image"),
    "another split's captions": (other_captions, {}, "has 16 rows, but its captions are of 8", "one split together"),
    "cut off": (cut_off, {}, "train_ims.npy has", "it is cut off"),
    "a pickle": (pickled, {}, "is no array of numpy", "np.save"),
    "objects": (objects, {}, "holds Python objects", "float32 or float16"),
    "pickled ids": (pickled_ids, {}, "is no row of ids", "Fetch that file again"),
    "vocabulary": (other_vocabulary, {}, "% of the words of", "tools.build_vocabulary"),
    "vectors": (short_vectors, VECTORS, "The word vectors have 2 numbers, the model's 96", "Name vectors of 96"),
    "vectors of two sizes": (uneven_vectors, VECTORS, "Line 2 of", "GloVe"),
    "another shape": (nothing, {"model.name": "scan-regions-gru"}, "36 regions of 2048 numbers", "scan-scenes-gru"),
    "no tokens": (nothing, {"model.head": "clip"}, "compares tokens, and head clip pools", "model.head to average"),
    "pvse without pie": (nothing, {"method": "pvse", "model.head": "average"}, "head is average", "--model.head pie"),
    "captions without regions": (nothing, VSRN | {"model.name": "ViT-Micro-32"}, "reads pixels", "scan-scenes-gru"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_data_ends_with_its_name_and_a_remedy(case, regions, tmp_path, capsys):
    damage, settings, what, remedy = CASES[case]
    folder = tmp_path / "data"
    shutil.copytree(regions, folder)
    damage(folder)
    settings = {name: folder / value if value == "vectors.txt" else value for name, value in settings.items()}
    options = {
        "method": "scan", "data.path": folder, "out": tmp_path / "run", "model.name": "scan-scenes-gru",
        "model.embed_dim": 8, "batch-size": 12, **settings,
    }  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: run_here(options))
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert what in told
    assert remedy in told
    assert "error: " in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
