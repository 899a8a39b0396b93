"""Index folders: written from embeddings, read through the page cache."""

import os
import re
import shutil
from argparse import Namespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.rankings import tolerance_scores
from probemb.search import choose_factory, load_index, search
from probemb.search.embeddings import create_embeddings, item_schema, open_embeddings
from probemb.search.index import cell_count, training_count
from tests.losses.points import unit_gaussians
from tools.build_index import main
from tools.search.command import open_index

DIM = 16
QUERIES = unit_gaussians(40, DIM, 5)
SIZES = (90, 0, 210, 140, 260)  # of the partitions


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """700 images and 700 captions in five partitions, one of them empty."""
    made = create_embeddings(tmp_path_factory.mktemp("embeddings") / "x", "runs/x", "f" * 64, DIM)
    r = torch.Generator().manual_seed(0)
    for kind in ("image", "text"):
        for number, n in enumerate(SIZES):
            mean = F.normalize(torch.randn(n, DIM, generator=r), dim=1)
            u = (torch.randn(n, generator=r) - 1).exp()
            made.write(kind, f"x-{number:05d}", mean.numpy(), u.numpy(), items(kind, number, n), {"shard": "x"})
    made.add_corpus("data", [f"x-{number:05d}" for number in range(len(SIZES))])
    return open_embeddings(made.folder)


def items(kind="image", number=0, n=1):
    rows = {"key": [f"{number}-{i}" for i in range(n)], "captions": [[f"{kind} {number} {i}"] for i in range(n)]}
    rows |= {"shard": [f"/data/{number}.tar"] * n, "offset": list(range(n)), "size": [7] * n, "url": [None] * n}
    return pa.table(rows | ({"number": [0] * n} if kind == "text" else {}), schema=item_schema(kind))


def gallery(embeddings, kind="image"):
    """The stored embeddings, as a Gaussian with these means and these sums of the variances."""
    mean, u = (np.concatenate(a) for a in zip(*(embeddings.read(part) for part in embeddings.partitions(kind))))
    log_var = (torch.from_numpy(u) / DIM).log()[:, None].expand(-1, DIM)
    return Gaussian(torch.from_numpy(mean).float(), log_var)


def build(embeddings, out, *more):
    assert main(["--embeddings", str(embeddings.folder), "--out", str(out), *map(str, more)]) == 0
    return load_index(out)


def recall(found, truth, k=10):
    best = truth.argsort(dim=1)[:, :k]
    return float((found[:, :, None] == best[:, None, :]).any(1).double().mean())


@pytest.mark.parametrize(("more", "parts"), [((), 1), (("--part-items", 64), 11), (("--kind", "text"), 1)])
def test_flat_ranks_and_measures_exactly_as_csd(more, parts, embeddings, tmp_path):
    index = build(embeddings, tmp_path / "index", "--factory", "Flat", *more)
    kind = "text" if "text" in more else "image"
    assert (len(index.parts), len(index), index.kind, index.form) == (parts, 700, kind, "csd")
    q, g = QUERIES, gallery(embeddings, kind)
    truth = csd(q, g)
    distance, found = search(index, q, 700)
    torch.testing.assert_close(truth.gather(1, found), truth.sort(dim=1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distance, truth.gather(1, found), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 700 for row in found.tolist())
    torch.testing.assert_close(index.uncertainty, g.uncertainty(), rtol=1e-5, atol=1e-6)
    places, means = index.sample
    assert torch.equal(means, g.mean[places])
    rows = [row for part in embeddings.partitions(kind) for row in embeddings.read_items(part).to_pylist()]
    assert [index.item(i) for i in range(700)] == rows
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    "factory", ["HNSW16", "IVF16,Flat", "IVF16,PQ16x4np", "OPQ8_16,IVF8,PQ8x6np", "SQ8", "PCA14,Flat", "PQ8x4np,RFlat"]
)
def test_any_factory_in_several_parts(factory, embeddings, tmp_path):
    q = QUERIES
    index = build(embeddings, tmp_path / "index", "--factory", factory, "--part-items", 300)
    assert len(index.parts) == 3
    _, found = search(index, q, 10)
    assert recall(found, csd(q, gallery(embeddings))) > (0.5 if re.search("PQ.*np$|PCA", factory) else 0.9)
    assert torch.equal(search(load_index(tmp_path / "index", memory_map=False), q, 10)[1], found)


def test_an_index_keeps_its_weight_of_the_variances(embeddings, tmp_path):
    """In parts, whose extra dimension needs the largest u of all of them."""
    index = build(embeddings, tmp_path / "index", "--tolerance", -1.0, "--part-items", 300)
    assert (index.form, index.weight, len(index.parts)) == ("csd", -1.0, 3)
    closest = tolerance_scores(QUERIES, gallery(embeddings), i2t=-1.0)(slice(None)).topk(50)
    distance, found = search(index, QUERIES, 50)
    assert torch.equal(found, closest.indices)
    torch.testing.assert_close(distance, -closest.values, rtol=1e-5, atol=1e-4)


def test_files_of_a_served_index_may_be_cut(embeddings, tmp_path):
    """As `cp` of another index over it does; a mapped one would end the process with SIGBUS."""
    build(embeddings, tmp_path / "index", "--factory", "IVF16,Flat")
    index = open_index(tmp_path / "index", Namespace(serve=True, rerank=None, effort=None), True)
    before = search(index, QUERIES, 5)
    for file in (tmp_path / "index").rglob("*.*"):
        os.truncate(file, 0)
    assert all(map(torch.equal, search(index, QUERIES, 5), before))
    assert index.item(699)["captions"] == ["image 4 259"]


def test_the_choice_follows_number_and_memory():
    gib = 1 << 30
    flat, graph, codes = (choose_factory(n, 512, m * gib) for n, m in ((50_000, 1), (1_000_000, 4), (1_000_000, 1)))
    assert [one.factory for one in (flat, graph, codes)] == ["Flat", "HNSW32", "OPQ64_512,IVF4096,PQ64np"]
    assert [one.effort for one in (flat, graph, codes)] == [None, 64, 64]
    assert choose_factory(1_000_000_000, 1024, 500 * gib).factory == "OPQ64_512,IVF131072_HNSW32,PQ64np"
    for n in (1000, 10**9):
        assert n / cell_count(n) >= 39  # below, FAISS warns
        assert training_count(f"IVF{cell_count(n)},PQ8", n) >= min(n, 39 * cell_count(n))


def test_damaged_embeddings_are_named_and_no_pickle_is_read(embeddings, tmp_path):
    file = shutil.copytree(embeddings.folder, tmp_path / "x") / "image" / "x-00002.npz"
    os.truncate(file, 900)
    with pytest.raises(UserError, match="x-00002"):
        main(["--embeddings", str(tmp_path / "x"), "--out", str(tmp_path / "index")])
    np.savez(file, mean=np.array([None] * 210, dtype=object), u=np.ones(210), about=np.array("{}"))
    with pytest.raises(UserError, match="x-00002"):
        main(["--embeddings", str(tmp_path / "x"), "--out", str(tmp_path / "index")])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_damaged_index_is_named(embeddings, tmp_path):
    build(embeddings, tmp_path / "index", "--part-items", 400)
    about = (tmp_path / "index" / "index.json").read_text()
    for message, name, content in (
        (r"00000.faiss holds 400 vectors of 20 dimensions, not 399", "index.json", about.replace("400", "399")),
        (r"items.arrow cannot be read \(another size", "index.json", about.replace('"count": 700', '"count": 701')),
        ("part-00001.faiss cannot be read", "part-00001.faiss", "x" * 1000),
        ("u.f32 cannot be read", "u.f32", "x" * 4 * 699),
    ):
        copy = shutil.copytree(tmp_path / "index", tmp_path / "spoilt")
        (copy / name).write_text(content)
        with pytest.raises(UserError, match=message):
            load_index(copy)
        shutil.rmtree(copy)


def test_a_build_that_was_killed_is_begun_anew(embeddings, tmp_path):
    left = tmp_path / ".index.unfinished"
    left.mkdir()
    (left / "part-00099.faiss").write_bytes(b"half")
    index = build(embeddings, tmp_path / "index")
    assert len(list((tmp_path / "index").glob("part-*"))) == len(index.parts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
