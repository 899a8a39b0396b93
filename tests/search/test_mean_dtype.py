"""Means in float16 or float32: what is stored, and that near-duplicates keep their order in float32."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from probemb import Gaussian
from probemb.data.images import decode_image
from probemb.errors import UserError
from probemb.models import load_model
from probemb.search import load_index, search
from probemb.search.embeddings import NAME, Embeddings, item_schema, open_embeddings, plan_embeddings, save_embeddings
from tests.embedding import corpus, options, whole  # noqa: F401 - fixtures
from tests.shards import iterate_samples
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.build_index import main as build
from tools.embed.command import main as embed

N, DIM = 600, 64


def indexed(folder, mean, mean_dtype):
    """An index of these means, all with the same uncertainty, made of files."""
    made = Embeddings(folder / "embeddings", "runs/x", "f" * 64, DIM, {"data": ["x"]}, mean_dtype)
    rows = {"key": [str(i) for i in range(N)], "captions": [["a"]] * N, "shard": ["/x.tar"] * N}
    rows |= {"offset": [0] * N, "size": [1] * N, "url": [None] * N}
    made.write("image", "x", mean, np.ones(N), pa.table(rows, schema=item_schema("image")), {"shard": "/x.tar"})
    save_embeddings(made, ["data"])
    assert build(["--embeddings", str(made.folder), "--out", str(folder / "index"), "--factory", "Flat"]) == 0
    return load_index(folder / "index")


def test_float32_keeps_the_order_of_near_duplicates(tmp_path):
    """30 groups of 20 items that lie within 1e-3 of each other, and a query near each."""
    r = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(30, 1, DIM, generator=r), dim=2)
    apart = 1e-3 * F.normalize(torch.randn(30, N // 30, DIM, generator=r), dim=2)
    mean = F.normalize(centres + apart, dim=2).reshape(N, DIM).numpy()
    queries = F.normalize(centres[:, 0] + 0.5 / DIM**0.5 * torch.randn(30, DIM, generator=r), dim=1).numpy()
    asked = Gaussian(torch.from_numpy(queries), torch.zeros(30, DIM))
    truth = np.argsort(((queries[:, None].astype(np.float64) - mean) ** 2).sum(2), axis=1)[:, :10]
    kept = {}
    for mean_dtype in ("float16", "float32"):
        found = search(indexed(tmp_path / mean_dtype, mean, mean_dtype), asked, 10)[1].numpy()
        kept[mean_dtype] = np.mean([len(np.intersect1d(a, b)) for a, b in zip(found, truth)]) / 10
    assert kept["float32"] == 1
    assert kept["float16"] < 0.99


def test_the_command_stores_float32_if_asked(corpus, whole, run_folder, tmp_path):  # noqa: F811
    assert embed(options(run_folder, corpus, tmp_path / "out", "--mean-dtype", "float32", "--items", "image")) == 0
    found = open_embeddings(tmp_path / "out")
    means = np.concatenate([found.read(part)[0] for part in found.partitions("image")])
    assert (found.mean_dtype, means.dtype) == ("float32", np.float32)
    model, _, transforms = load_model(run_folder)
    samples = [sample for tar in sorted(corpus.glob("*.tar")) for sample in iterate_samples(tar)]
    with torch.inference_mode():
        expected = torch.cat(
            [model.encode_image(transforms.evaluate(decode_image(s.image))[None]).mean for s in samples]
        )
    np.testing.assert_allclose(means, expected, atol=1e-6)
    halves = open_embeddings(whole)
    halves = np.concatenate([halves.read(part)[0] for part in halves.partitions("image")])
    np.testing.assert_array_equal(means.astype(np.float16), halves)
    assert embed(options(run_folder, corpus, tmp_path / "out", "--items", "image")) == 0  # the folder's own
    assert open_embeddings(tmp_path / "out").mean_dtype == "float32"
    with pytest.raises(UserError, match="holds means in float32, not in float16"):
        embed(options(run_folder, corpus, tmp_path / "out", "--mean-dtype", "float16"))


def test_a_folder_that_does_not_say_has_float16(tmp_path):
    made = plan_embeddings(tmp_path / "x", "runs/x", "f" * 64, DIM, {"data": []})
    save_embeddings(made, ["data"])
    file = tmp_path / "x" / NAME
    about = json.loads(file.read_text())
    assert about.pop("mean_dtype") == "float16"
    file.write_text(json.dumps(about))
    assert open_embeddings(tmp_path / "x").mean_dtype == "float16"
    file.write_text(json.dumps(about | {"mean_dtype": "int8"}))
    with pytest.raises(UserError, match="does not describe embeddings"):
        open_embeddings(tmp_path / "x")
