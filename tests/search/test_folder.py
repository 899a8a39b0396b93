"""Index folders: written from embeddings, read through the page cache."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.scores import tolerance_scores
from probemb.metrics import ranking
from probemb.runs.lock import RunLock
from probemb.search import (
    Choice,
    build_index,
    choose_factory,
    items,
    load_index,
    refuse_small_gallery,
    require_model,
    rerank,
    search,
    search_weighted,
    set_effort,
)
from probemb.search.choice import bytes_per_item, cell_count, training_count
from probemb.search.embeddings import Embeddings, item_schema, open_embeddings, plan_embeddings, save_embeddings
from probemb.search.index import new_index, train, width_of
from probemb.search.writing import Recipe, write_index
from tools.build_index import main
from tools.search.command import open_index

ROOT = Path(__file__).resolve().parents[2]
DIM = 16
SIZES = (90, 0, 210, 140, 260)  # of the partitions
MAPPED = ("part-00000.faiss", "part-00001.faiss", "u.f32", "items/00000.parquet")


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """700 images and 700 captions in five partitions, one of them empty."""
    made = Embeddings(tmp_path_factory.mktemp("embeddings"), "runs/x", "f" * 64, DIM, {})
    return fill(made, SIZES)


def fill(made, sizes, seed=0):
    r = torch.Generator().manual_seed(seed)
    for kind in ("image", "text"):
        for number, n in enumerate(sizes):
            mean = F.normalize(torch.randn(n, made.dim, generator=r), dim=1)
            u = (torch.randn(n, generator=r) - 1).exp()
            rows = {
                "key": [f"{number}-{i}" for i in range(n)],
                "captions": [[f"{kind} {number} {i}"] for i in range(n)],
                "shard": [f"/data/{number}.tar"] * n,
                "offset": list(range(n)),
                "size": [7] * n,
                "url": [None] * n,
                **({"number": [0] * n} if kind == "text" else {}),
            }
            table = pa.table(rows, schema=item_schema(kind))
            made.write(kind, f"x-{number:05d}", mean.numpy(), u.numpy(), table, {"shard": f"/data/{number}.tar"})
    names = [f"x-{number:05d}" for number in range(len(sizes))]
    save_embeddings(Embeddings(made.folder, made.model, made.weights, made.dim, {"data": names}), ["data"])
    return open_embeddings(made.folder)


def gallery(embeddings, kind="image"):
    """What was stored, as a Gaussian with these means and these sums of the variances."""
    mean, u = (np.concatenate(a) for a in zip(*(embeddings.read(part) for part in embeddings.partitions(kind))))
    log_var = (torch.from_numpy(u) / DIM).log()[:, None].expand(-1, DIM)
    return Gaussian(torch.from_numpy(mean).float(), log_var)


def queries(n=40, seed=5):
    r = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(n, DIM, generator=r), dim=1), torch.randn(n, DIM, generator=r) - 3)


def build(embeddings, out, *more):
    assert main(["--embeddings", str(embeddings.folder), "--out", str(out), *map(str, more)]) == 0
    return load_index(out)


def recall(found, truth, k=10):
    best = truth.argsort(dim=1)[:, :k]
    return float((found[:, :, None] == best[:, None, :]).any(1).double().mean())


@pytest.mark.parametrize("more", [(), ("--part-items", 64), ("--kind", "text"), ("--memory-gib", 1e-5)])
def test_flat_ranks_and_measures_exactly_as_csd(more, embeddings, tmp_path, monkeypatch):
    monkeypatch.setattr(items, "ROWS_PER_FILE", 128)
    monkeypatch.setattr(items, "ROWS_PER_GROUP", 32)
    monkeypatch.setattr("tools.build_index.MIN_GIB", 0)  # the gallery is small
    index = build(embeddings, tmp_path / "index", "--factory", "Flat", *more)
    kind = "text" if "text" in more else "image"
    assert len(index.parts) == {(): 1, ("--part-items", 64): 11, ("--memory-gib", 1e-5): 5}.get(more, 1)
    assert (len(index), index.dim, index.kind, index.form, index.model) == (700, DIM, kind, "csd", "runs/x")
    q, g = queries(), gallery(embeddings, kind)
    truth = csd(q, g)
    distance, found = search(index, q, 700)
    torch.testing.assert_close(truth.gather(1, found), truth.sort(dim=1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distance, truth.gather(1, found), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 700 for row in found.tolist())
    torch.testing.assert_close(index.uncertainty, g.uncertainty(), rtol=1e-5, atol=1e-6)
    rows = [row for part in embeddings.partitions(kind) for row in embeddings.read_items(part).to_pylist()]
    assert [index.item(i) for i in range(700)] == rows
    with pytest.raises(IndexError):
        index.item(700)
    assert sorted(file.suffix for file in tmp_path.rglob(".*")) == []


def test_flat_vectors_are_filled_to_16_bytes_and_narrower_ones_are_read(embeddings, tmp_path, monkeypatch):
    assert [width_of(512, form, "Flat") for form in ("csd", "mean")] == [516, 512]
    index = build(embeddings, tmp_path / "index", "--factory", "Flat")
    monkeypatch.setattr("probemb.search.index._multiple", lambda factory: 1)
    before = build(embeddings, tmp_path / "before", "--factory", "Flat")
    assert (index.width, before.width) == (20, 17)
    assert torch.equal(search(before, queries(), 10)[1], search(index, queries(), 10)[1])


@pytest.mark.parametrize(
    "factory",
    ["HNSW16", "IVF16,Flat", "IVF16,PQ16x4np", "OPQ8_16,IVF8,PQ8x6np", "SQ8", "PQ8x6np", "PCA14,Flat", "PQ8x4np,RFlat"],
)
def test_any_factory_in_one_part_or_several(factory, embeddings, tmp_path):
    q = queries()
    truth = csd(q, gallery(embeddings))
    for number, more in enumerate(((), ("--part-items", 300))):
        index = build(embeddings, tmp_path / str(number), "--factory", factory, *more)
        assert len(index.parts) == (3 if more else 1)
        _, found = search(index, q, 10)
        assert recall(found, truth) > (0.5 if re.search("PQ.*np$|PCA", factory) else 0.9)
        whole = load_index(tmp_path / str(number), memory_map=False)
        assert torch.equal(search(whole, q, 10)[1], found)
    assert (faiss.IndexHNSW in type(index.parts[0]).__mro__) == factory.startswith("HNSW")


def test_a_warning_of_faiss_is_shown_once(embeddings, tmp_path, capfd):
    build(embeddings, tmp_path / "index", "--factory", "PQ8np")
    said = capfd.readouterr().err
    assert said.count("700 points to 256 centroids") == 1  # of eight
    build(embeddings, tmp_path / "graph", "--factory", "HNSW8")
    assert "items: 700" in capfd.readouterr().err


def test_effort_is_traded_for_recall(embeddings, tmp_path):
    q = queries()
    truth = csd(q, gallery(embeddings))
    index = build(embeddings, tmp_path / "ivf", "--factory", "IVF32,Flat", "--effort", 1, "--part-items", 300)
    few = recall(search(index, q, 10)[1], truth)
    assert set_effort(index, 32) == "nprobe"
    assert few < 0.7 < recall(search(index, q, 10)[1], truth) == 1
    index = build(embeddings, tmp_path / "graph", "--factory", "HNSW4", "--effort", 1)
    few = recall(search(index, q, 10)[1], truth)
    assert set_effort(index, 400) == "efSearch"
    assert few < recall(search(index, q, 10)[1], truth)
    index = build_index(gallery(embeddings), "NSG8")
    set_effort(index, 1)
    few = recall(search(index, q, 10)[1], truth)
    assert set_effort(index, 400) == "search_L"
    assert few < recall(search(index, q, 10)[1], truth)
    assert set_effort(build(embeddings, tmp_path / "flat"), 3) is None


def test_the_two_step_form_reads_the_uncertainties_from_their_file(embeddings, tmp_path):
    q = queries()
    truth = csd(q, gallery(embeddings))
    index = build(embeddings, tmp_path / "index", "--form", "mean", "--part-items", 300)
    assert index.form == "mean"
    distance, found = rerank(index, q, 10, candidates=700)
    torch.testing.assert_close(distance, truth.sort(dim=1).values[:, :10], rtol=1e-5, atol=1e-5)
    _, few = rerank(index, q, 10, candidates=20)
    assert recall(few, truth) < recall(found, truth) == 1


@pytest.mark.parametrize("weight", [-1.0, 0.5])
def test_an_index_keeps_its_weight_of_the_variances(weight, embeddings, tmp_path):
    """In parts, whose extra dimension needs the largest u of all of them."""
    index = build(embeddings, tmp_path / "index", "--tolerance", weight, "--part-items", 300)
    about = json.loads((tmp_path / "index" / "index.json").read_text())
    assert (index.form, index.weight, about["tolerance"], len(index.parts)) == ("tolerance", weight, weight, 3)
    q, g = queries(), gallery(embeddings)
    scores = tolerance_scores(q, g, i2t=weight)(slice(0, len(q)))
    distance, found = search(index, q, 50)
    assert torch.equal(found, ranking(scores, 50))
    torch.testing.assert_close(distance, -scores.gather(1, found), rtol=1e-5, atol=1e-4)
    assert torch.equal(search_weighted(index, q, 10, 1.0)[1], search(build(embeddings, tmp_path / "csd"), q, 10)[1])
    graph = build(embeddings, tmp_path / "graph", "--tolerance", weight, "--factory", "HNSW16", "--effort", 100)
    assert recall(search(graph, q, 10)[1], -scores) > 0.9
    (tmp_path / "index" / "index.json").write_text(json.dumps(about | {"tolerance": None}))
    with pytest.raises(UserError, match="does not describe an index"):
        load_index(tmp_path / "index")
    assert build(embeddings, tmp_path / "one", "--tolerance", 1).form == "csd"


@pytest.mark.parametrize(
    ("factory", "least"),
    [
        ("Flat", 1), ("SQ8", 1), ("HNSW32", 1), ("IVF16,Flat", 16), ("IVF16,PQ4x4np", 16), ("IVF8,PQ4x5np", 32),
        ("IMI2x4,Flat", 16), ("IVF64_HNSW32,Flat", 64), ("PQ4np", 256), ("PCA8,IVF300,PQ4np", 300),
        ("OPQ4,PQ4x4np", 256),
    ],
)  # fmt: skip
def test_the_least_gallery_is_the_least_that_faiss_trains(factory, least):
    vectors = np.random.default_rng(0).standard_normal((least, 16), dtype=np.float32)
    refuse_small_gallery(factory, least)
    index = new_index(16, factory)
    train(index, vectors, factory)
    index.add(vectors)
    assert index.ntotal == least
    if least > 1:
        with pytest.raises(UserError, match=f"from {least - 1} items: it needs at least {least}"):
            refuse_small_gallery(factory, least - 1)
        with pytest.raises(UserError, match=f"from {least - 1} items"):
            train(new_index(16, factory), vectors[1:], factory)


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF16,Flat", "OPQ8_16,IVF8,PQ8x4np"])
def test_the_files_are_mapped_and_not_read(factory, embeddings, tmp_path):
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("this system does not say what is mapped")
    index = build(embeddings, tmp_path / "index", "--factory", factory, "--part-items", 350)
    with open("/proc/self/maps") as file:
        mapped = set(re.findall(re.escape(str(tmp_path)) + r"/\S+", file.read()))
    assert mapped == {str(tmp_path / "index" / name) for name in MAPPED}
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    search(index, queries(), 5)
    assert {file: file.read_bytes() for file in before} == before


def test_an_opened_index_stays_what_it_was(embeddings, tmp_path):
    """Also the metadata that it has not looked at yet, after its folder was replaced by another index, or removed."""
    first = build(embeddings, tmp_path / "index")
    again = load_index(tmp_path / "index")
    before = search(first, queries(), 5)
    build(embeddings, tmp_path / "other", "--kind", "text")
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "other").rename(tmp_path / "index")
    other = load_index(tmp_path / "index")
    assert first.identity == again.identity != other.identity
    assert first.item(0)["captions"] == ["image 0 0"]
    assert other.item(0)["captions"] == ["text 0 0"]
    shutil.rmtree(tmp_path / "index")
    assert other.item(699)["captions"] == ["text 4 259"]
    assert all(map(torch.equal, search(first, queries(), 5), before))


def test_files_of_a_served_index_may_be_cut(embeddings, tmp_path):
    """As `cp` of another index over it does; a mapped one would end the process with SIGBUS."""
    build(embeddings, tmp_path / "index", "--factory", "IVF16,Flat")
    index = open_index(tmp_path / "index", Namespace(serve=True, rerank=None, effort=None), "cpu", True)
    before = search(index, queries(), 5)
    for file in (tmp_path / "index").rglob("*.*"):
        os.truncate(file, 0)
    assert all(map(torch.equal, search(index, queries(), 5), before))
    assert index.item(699)["captions"] == ["image 4 259"]


def test_the_choice_says_why():
    gib = 1 << 30
    flat, graph, codes = choose_factory(50_000, 512, gib), choose_factory(1_000_000, 512, 4 * gib), None
    assert (flat.factory, graph.factory) == ("Flat", "HNSW32")
    assert "exact" in flat.why
    assert "2.1 GiB" in graph.why
    codes = choose_factory(1_000_000, 512, gib)
    assert codes.factory == "OPQ64_512,IVF4096,PQ64np"
    assert "compressed" in codes.why
    assert "from the disk" not in codes.why
    assert "from the disk" in choose_factory(1_000_000_000, 512, gib).why
    assert choose_factory(1_000_000_000, 1024, 500 * gib).factory == "OPQ64_512,IVF131072_HNSW32,PQ64np"
    for n in (1000, 10**6, 10**9):
        assert n / cell_count(n) >= 39  # below, FAISS warns
        assert training_count(f"IVF{cell_count(n)},PQ8", n) >= min(n, 39 * cell_count(n))
    assert training_count("IVF131072,PQ8", 10**9, 512, gib) == gib // (8 * 513)
    for dim in (4, 17, 100, 300, 512, 768, 1024):
        for form in ("csd", "mean"):
            factory = choose_factory(10**9, dim, gib).factory
            assert new_index(width_of(dim, form, factory), factory).d == dim + (form == "csd")


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "HNSW32",
        "IVF64,Flat",
        "PQ16np",
        "IVF64,PQ32x4np",
        "SQ8",
        "IVF64,SQfp16",
        "HNSW16,SQ8",
        "PQ16x4np,RFlat",
        "PQ16x4np,Refine(SQ8)",
    ],
)
def test_bytes_of_an_item_are_nearly_those_of_the_file(factory):
    x = np.random.default_rng(0).standard_normal((2000, width_of(64, "csd", factory)), dtype=np.float32)
    index = new_index(x.shape[1], factory)
    index.train(x)
    empty = len(faiss.serialize_index(index))
    index.add(x)
    size = (len(faiss.serialize_index(index)) - empty) / 2000
    assert 0.7 * size < bytes_per_item(factory, 64) < 1.3 * size + 8


def test_an_index_of_another_model_is_refused(embeddings, tmp_path):
    index = build(embeddings, tmp_path / "index")
    require_model(index, "elsewhere/x", "f" * 64, DIM)
    for weights, dim in (("e" * 64, DIM), ("f" * 64, 8)):
        with pytest.raises(UserError, match=rf"made with runs/x \(f+, 16 .*model is runs/y \(\w+, {dim} dimensions"):
            require_model(index, "runs/y", weights, dim)
    q = queries()
    with pytest.raises(UserError, match="the gallery has 16 dimensions"):
        search(index, Gaussian(q.mean[:, :8], q.log_var[:, :8]), 3)
    with pytest.raises(UserError, match="NaN or infinity"):
        search(index, Gaussian(q.mean / 0, q.log_var), 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factory", "HNWS32"], "FAISS makes no index of 'HNWS32'"),
        (["--factory", "LSH"], "'LSH' does not rank by the Euclidean distance"),
        (["--factory", "L2norm,Flat"], "'L2norm,Flat' does not rank by the Euclidean distance"),
        (["--factory", "PCA8,L2norm,IVF8,Flat"], "does not rank by the Euclidean distance"),
        (["--factory", "PCAW8,Flat"], "'PCAW8,Flat' does not rank by the Euclidean distance"),
        (["--factory", "ITQ8,Flat"], "'ITQ8,Flat' does not rank by the Euclidean distance"),
        (["--factory", "PQ8x20000"], "'PQ8x20000' has codes of 20000 bits"),
        (["--factory", "PQ8x0"], "'PQ8x0' has codes of 0 bits"),
        (["--factory", "ITQ,LSH"], "does not rank by the Euclidean distance|FAISS makes no index"),
        (["--factory", "IVF4096,Flat"], "cannot be made from 700 items"),
        (["--train-items", "701"], "--train-items is 701 of 700 items"),
        (["--part-items", "0"], "--part-items is 0"),
        (["--part-items", "-5"], "--part-items is -5"),
        (["--part-items", "nan"], "--part-items: invalid int value: 'nan'"),
        (["--memory-gib", "nan"], "--memory-gib is nan"),
        (["--memory-gib", "0"], r"--memory-gib is 0\.0"),
        (["--memory-gib", "-1"], r"--memory-gib is -1\.0"),
        (["--memory-gib", "inf"], "--memory-gib is inf, and this machine has"),
        (["--memory-gib", "1e9"], r"--memory-gib is 1e\+09, and this machine has .*use --factory"),
        (["--memory-gib", "0.000001"], r"--memory-gib is 1e-06, which holds no index\. Give at least 0\.001"),
        (["--effort", "5"], "The index 'Flat' always searches everything"),
        (["--effort", "0"], "--effort is 0"),
        (["--factory", "HNSW8", "--effort", str(10**30)], r"--effort is 1,000,.* of 700 items"),
        (["--seed", "-1"], "--seed is -1"),
        (["--form", "variance"], "invalid choice: 'variance'"),
        (["--form", "mean", "--tolerance", "-1"], "--form mean leaves the variances out"),
        (["--tolerance", "inf"], "--tolerance is inf"),
        (["--kind", "audio"], "invalid choice: 'audio'"),
        (["--embeddings", "nowhere"], "There are no embeddings in nowhere"),
        (["--embeddings", "OTHER", "EMBEDDINGS"], r"embedded by runs/y \(e+, 16 dim.*by runs/x \(f+, 16 dim"),
        (["--embeddings", "EMBEDDINGS", "EMBEDDINGS"], "named twice"),
        (["--embeddings", "PARTLY", "--kind", "text"], "PARTLY holds no text embeddings"),
        (["--embeddings", "PARTLY"], "image embeddings of .* are not complete"),
        (["--embeddings", "EMPTY", "--incomplete"], "hold no image embeddings"),
        (["--out", "there"], "there is there already"),
        (["--device", "cuda"], "no GPU"),
    ],
)
def test_what_cannot_be_built_is_refused(words, message, embeddings, tmp_path, monkeypatch):
    if "cuda" in words and faiss.get_num_gpus():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    folders = {"EMBEDDINGS": embeddings.folder}
    for name, weights, shards in (("OTHER", "e", ["x"]), ("PARTLY", "f", ["x", "y"]), ("EMPTY", "f", ["x"])):
        folders[name] = tmp_path / name
        made = Embeddings(folders[name], "runs/y", weights * 64, DIM, {"data": shards})
        if name != "EMPTY":
            made.write("image", "x", np.ones((1, DIM)), np.ones(1), one_row(), {"shard": "x"})
        save_embeddings(made, made.corpora)
    (tmp_path / "there").mkdir()
    given = [] if "--embeddings" in words else ["--embeddings", str(embeddings.folder)]
    argv = [*given, "--out", "index", *(str(folders.get(w, w)) for w in words)]
    with pytest.raises(UserError, match=message):
        main(argv)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["EMPTY", "OTHER", "PARTLY", "there"]
    assert not list((tmp_path / "there").iterdir())


def test_an_index_has_no_more_parts_than_a_search_can_open(embeddings, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.build_index.MAX_PARTS", 9)
    monkeypatch.setattr("tools.build_index.MIN_GIB", 0)  # the gallery is small
    words = ["--embeddings", str(embeddings.folder), "--out", str(tmp_path / "index"), "--factory", "Flat"]
    with pytest.raises(UserError, match=r"cuts 700 items into more than 9 parts\. Give at least 78\."):
        main([*words, "--part-items", "77"])
    with pytest.raises(UserError, match=r"--memory-gib 1e-06 holds 15 of 700 items .* Give at least 5\.4e-06\."):
        main([*words, "--memory-gib", "1e-6"])
    assert len(build(embeddings, tmp_path / "index", *words[4:], "--memory-gib", "5.4e-6").parts) == 9


def test_items_of_an_older_version_have_no_url(embeddings, tmp_path):
    part = embeddings.partitions("image")[0]
    path = embeddings.folder / "image" / f"{part.name}.parquet"
    kept = path.read_bytes()
    try:
        pq.write_table(pq.read_table(path).drop_columns(["url"]), path)
        assert embeddings.read_items(part)["url"].to_pylist() == [None] * part.count
    finally:
        path.write_bytes(kept)


def one_row():
    rows = {"key": ["k"], "captions": [["c"]], "shard": ["x"], "offset": [0], "size": [1], "url": [None]}
    return pa.table(rows, schema=item_schema("image"))


def test_what_is_there_so_far_can_be_taken(embeddings, tmp_path):
    made = Embeddings(tmp_path / "partly", "runs/x", "f" * 64, DIM, {"data": ["x", "y"]})
    made.write("image", "x", np.ones((1, DIM)), np.ones(1), one_row(), {"shard": "x"})
    save_embeddings(made, made.corpora)
    index = build(embeddings, tmp_path / "index", "--embeddings", made.folder, "--incomplete")
    assert len(index) == 701
    assert index.item(700)["key"] == "k"


def test_commands_that_begin_at_once_keep_what_the_other_says(tmp_path):
    first = plan_embeddings(tmp_path / "x", "runs/x", "f" * 64, DIM, {"a": ["a-0"]})
    second = plan_embeddings(tmp_path / "x", "runs/x", "f" * 64, DIM, {"b": ["b-0", "b-1"]})
    save_embeddings(first, ["a"])
    save_embeddings(second, ["b"])
    (tmp_path / "x" / ".embeddings.json.k3x9").write_bytes(b"")  # of a killed process
    assert open_embeddings(tmp_path / "x").corpora == {"a": ["a-0"], "b": ["b-0", "b-1"]}
    late = plan_embeddings(tmp_path / "x", "runs/x", "f" * 64, DIM, {"c": ["c-0"]})
    save_embeddings(plan_embeddings(tmp_path / "x", "runs/x", "f" * 64, DIM, {"a": ["a-0", "a-1"]}), ["a"])
    save_embeddings(late, ["c"])
    assert open_embeddings(tmp_path / "x").corpora == {"a": ["a-0", "a-1"], "b": ["b-0", "b-1"], "c": ["c-0"]}
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / ".embeddings.json.k3x9").write_bytes(b"")
    assert plan_embeddings(tmp_path / "y", "runs/x", "f" * 64, DIM, {}).corpora == {}


def of_other_types(table):
    return table.set_column(table.column_names.index("offset"), "offset", pa.array(["no number"] * len(table)))


def test_damaged_embeddings_are_named(embeddings, tmp_path):
    for name, spoil in {
        "x-00002.npz": lambda file: file.write_bytes(file.read_bytes()[:900]),
        "x-00002.parquet": lambda file: file.write_bytes(b"PAR1" * 9),
        "x-00004.parquet": lambda file: pq.write_table(of_other_types(pq.read_table(file)), file),
        "x-00003.parquet": lambda file: shutil.copy(file.with_name("x-00002.parquet"), file),
        "x-00002.done.json": lambda file: file.write_text('{"count": "many"}'),
    }.items():
        folder = tmp_path / f"of {name}"
        shutil.copytree(embeddings.folder, folder)
        spoil(folder / "image" / name)
        with pytest.raises(UserError, match=re.escape(name)):
            main(["--embeddings", str(folder), "--out", str(tmp_path / "index")])
    with open(tmp_path / "of x-00002.npz" / "image" / "x-00002.npz", "wb") as file:
        np.savez(file, mean=np.array([None] * 210, dtype=object), u=np.ones(210))  # a pickle inside
    with pytest.raises(UserError, match=r"x-00002.npz cannot be read \(ValueError\)"):
        main(["--embeddings", str(tmp_path / "of x-00002.npz"), "--out", str(tmp_path / "index")])
    nan = Embeddings(tmp_path / "nan", "runs/x", "f" * 64, DIM, {"data": ["x"]})
    nan.write("image", "x", np.full((1, DIM), np.nan), np.ones(1), one_row(), {"shard": "x"})
    save_embeddings(nan, nan.corpora)
    with pytest.raises(UserError, match="NaN or infinity"):
        main(["--embeddings", str(nan.folder), "--out", str(tmp_path / "index")])
    assert not [file for file in tmp_path.iterdir() if "index" in file.name]


def test_a_damaged_index_is_named(embeddings, tmp_path):
    build(embeddings, tmp_path / "index", "--part-items", 400)
    about = json.loads((tmp_path / "index" / "index.json").read_text())

    def edit(**changes):
        return lambda folder: (folder / "index.json").write_text(json.dumps({**about, **changes}))

    parts = about["parts"]
    for message, spoil in (
        ("There is no index in", lambda folder: (folder / "index.json").unlink()),
        ("not readable JSON", lambda folder: (folder / "index.json").write_text("{")),
        ("has the format 2, not 1", edit(format=2)),
        ("does not describe an index", edit(dim="16")),
        ("does not describe an index", edit(parts=[{"file": "../../etc/passwd", "count": 700}])),
        ("does not describe an index", edit(parts=parts[:1])),
        ("part-00001.faiss holds 300 vectors", edit(count=701, parts=[parts[0], {**parts[1], "count": 301}])),
        ("lacks part-00001.faiss", lambda folder: (folder / "part-00001.faiss").unlink()),
        ("part-00001.faiss cannot be read", lambda folder: os.truncate(folder / "part-00001.faiss", 1000)),
        ("u.f32 does not hold 700 numbers", lambda folder: os.truncate(folder / "u.f32", 4 * 699)),
        ("u.f32 cannot be read", lambda folder: (folder / "u.f32").unlink()),
    ):
        folder = tmp_path / "spoilt"
        shutil.copytree(tmp_path / "index", folder)
        spoil(folder)
        with pytest.raises(UserError, match=message):
            load_index(folder)
        shutil.rmtree(folder)
    os.truncate(tmp_path / "index" / "items" / "00000.parquet", 100)
    with pytest.raises(UserError, match=r"00000.parquet cannot be read"):
        load_index(tmp_path / "index").item(0)
    with pytest.raises(UserError, match="There is no device 'gpu'"):
        load_index(tmp_path / "index", device="gpu")
    if not faiss.get_num_gpus():
        with pytest.raises(UserError, match="sees no GPU"):
            load_index(tmp_path / "index", device="cuda")
        assert len(load_index(tmp_path / "index", device="auto")) == 700


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from probemb.search.embeddings import open_embeddings
from probemb.search import Choice
from probemb.search.writing import Recipe, write_index

@contextmanager
def show(title, total):
    added = 0

    def advance(n):
        nonlocal added
        added += n
        if added > 330:  # in the middle of the fourth part
            os.kill(os.getpid(), signal.SIGKILL)

    yield advance

embeddings, factory, out = sys.argv[1:]
recipe = Recipe([open_embeddings(embeddings)], "image", Choice(factory, "", None), part_items=100, train_items=200)
write_index(Path(out), recipe, show=show)
"""


@pytest.mark.parametrize("factory", ["Flat", "IVF8,SQ8"])
def test_a_killed_build_goes_on_behind_its_last_whole_part(factory, embeddings, tmp_path, capsys):
    words = ["--embeddings", str(embeddings.folder), "--factory", factory, "--part-items=100", "--train-items=200"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    index, unfinished = tmp_path / "index", tmp_path / ".index.unfinished"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(embeddings.folder), factory, str(index)], cwd=ROOT, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL
    assert not index.exists()
    parts = {path.name: path.stat().st_ino for path in unfinished.glob("part-*")}
    assert sorted(parts) == [f"part-{i:05d}.faiss" for i in range(3)]

    (unfinished / ".part-00003.faiss.abcd").write_bytes(b"half")  # as a killed command leaves it
    with pytest.raises(UserError, match="unfinished work of a command that differed in width, form"):
        main([*words, "--out", str(index), "--form", "mean"])
    lock = RunLock(unfinished)
    with pytest.raises(UserError, match="is in use"):
        main([*words, "--out", str(index)])
    lock.release()

    capsys.readouterr()
    assert main([*words[:4], "--out", str(index)]) == 0  # with the sizes of the one that was killed
    assert "resuming after 3 of 7 parts" in capsys.readouterr().out
    assert contents(index) == contents(tmp_path / "whole")
    assert {name: (index / name).stat().st_ino for name in parts} == parts
    assert not unfinished.exists()


def test_embeddings_that_change_are_noticed(tmp_path):
    made = fill(Embeddings(tmp_path / "embeddings", "runs/x", "f" * 64, DIM, {}), SIZES)
    last = made.path(made.partitions("image")[-1])

    @contextmanager
    def show(title, total):
        yield lambda n: os.utime(last, ns=(0, total))  # as soon as something is added

    where, recipe = tmp_path / "index", Recipe([made], "image", Choice("Flat", "", None), part_items=100)
    with pytest.raises(UserError, match="embeddings have changed while their index was built"):
        write_index(where, recipe, show=show)
    assert not where.exists()
    subprocess.run([sys.executable, "-c", KILLED, str(made.folder), "Flat", str(where)], cwd=ROOT, timeout=300)
    os.utime(last)
    with pytest.raises(UserError, match=r"embeddings have changed since .*unfinished was started"):
        main(["--embeddings", str(made.folder), "--factory", "Flat", "--out", str(where)])


def test_a_folder_that_is_removed_meanwhile_or_an_index_that_appears(embeddings, tmp_path):
    where, unfinished = tmp_path / "index", tmp_path / ".index.unfinished"
    recipe = Recipe([embeddings], "image", Choice("Flat", "", None), part_items=100)

    @contextmanager
    def remove(title, total):
        yield lambda n: shutil.rmtree(unfinished, ignore_errors=True)

    with pytest.raises(UserError, match="were removed while it was written"):
        write_index(where, recipe, show=remove)

    @contextmanager
    def appear(title, total):
        yield lambda n: where.mkdir(exist_ok=True)

    with pytest.raises(UserError, match="has appeared while the index was built"):
        write_index(where, recipe, show=appear)
    where.rmdir()
    write_index(where, recipe)
    assert len(load_index(where)) == 700


def test_the_last_bytes_of_a_part_find_no_room(embeddings, tmp_path):
    words = ["--embeddings", str(embeddings.folder), "--factory", "Flat", "--part-items", "400"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    size = (tmp_path / "whole" / "part-00000.faiss").stat().st_size
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4096 * 4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written to .*: File too large"):
            main([*words, "--out", str(tmp_path / "index")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_full_disk_leaves_nothing(embeddings, tmp_path):
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"The index cannot be written to .*index"):
            main(["--embeddings", str(embeddings.folder), "--out", str(tmp_path / "index")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
