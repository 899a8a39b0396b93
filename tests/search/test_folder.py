"""Index folders: written from embeddings, read through the page cache."""

import json
import os
import re
import resource
import shutil
import signal
from argparse import Namespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from probemb import Gaussian
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.scores import tolerance_scores
from probemb.metrics import ranking
from probemb.search import (
    build_index,
    choose_factory,
    folder,
    load_index,
    require_model,
    search,
    search_weighted,
    set_effort,
)
from probemb.search.choice import cell_count, training_count
from probemb.search.embeddings import create_embeddings, item_schema, open_embeddings
from probemb.search.index import new_index, width_of
from tools.build_index import main
from tools.search.command import open_index

DIM = 16
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


@pytest.mark.parametrize(("more", "parts"), [((), 1), (("--part-items", 64), 11), (("--kind", "text"), 1)])
def test_flat_ranks_and_measures_exactly_as_csd(more, parts, embeddings, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "ROWS_PER_FILE", 128)
    monkeypatch.setattr(folder, "ROWS_PER_GROUP", 32)
    index = build(embeddings, tmp_path / "index", "--factory", "Flat", *more)
    kind = "text" if "text" in more else "image"
    assert (len(index.parts), len(index), index.kind, index.form) == (parts, 700, kind, "csd")
    q, g = queries(), gallery(embeddings, kind)
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
    with pytest.raises(IndexError):
        index.item(700)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    "factory", ["HNSW16", "IVF16,Flat", "IVF16,PQ16x4np", "OPQ8_16,IVF8,PQ8x6np", "SQ8", "PCA14,Flat", "PQ8x4np,RFlat"]
)
def test_any_factory_in_several_parts(factory, embeddings, tmp_path):
    q = queries()
    index = build(embeddings, tmp_path / "index", "--factory", factory, "--part-items", 300)
    assert len(index.parts) == 3
    _, found = search(index, q, 10)
    assert recall(found, csd(q, gallery(embeddings))) > (0.5 if re.search("PQ.*np$|PCA", factory) else 0.9)
    assert torch.equal(search(load_index(tmp_path / "index", memory_map=False), q, 10)[1], found)


def test_effort_is_traded_for_recall(embeddings, tmp_path):
    q = queries()
    truth = csd(q, gallery(embeddings))
    for index, name, most in (
        (build(embeddings, tmp_path / "ivf", "--factory", "IVF32,Flat", "--effort", 1), "nprobe", 32),
        (build(embeddings, tmp_path / "graph", "--factory", "HNSW4", "--effort", 1), "efSearch", 400),
        (build_index(gallery(embeddings), "NSG8"), "search_L", 400),
    ):
        set_effort(index, 1)
        few = recall(search(index, q, 10)[1], truth)
        assert set_effort(index, most) == name
        assert few < recall(search(index, q, 10)[1], truth)
    assert set_effort(build(embeddings, tmp_path / "flat"), 3) is None


@pytest.mark.parametrize("weight", [-1.0, 0.5])
def test_an_index_keeps_its_weight_of_the_variances(weight, embeddings, tmp_path):
    """In parts, whose extra dimension needs the largest u of all of them."""
    index = build(embeddings, tmp_path / "index", "--tolerance", weight, "--part-items", 300)
    assert (index.form, index.weight, len(index.parts)) == ("csd", weight, 3)
    q, g = queries(), gallery(embeddings)
    scores = tolerance_scores(q, g, i2t=weight)(slice(0, len(q)))
    distance, found = search(index, q, 50)
    assert torch.equal(found, ranking(scores, 50))
    torch.testing.assert_close(distance, -scores.gather(1, found), rtol=1e-5, atol=1e-4)
    assert torch.equal(search_weighted(index, q, 10, 1.0)[1], search(build(embeddings, tmp_path / "csd"), q, 10)[1])


def test_an_opened_index_stays_what_it_was(embeddings, tmp_path):
    """Also the metadata that it has not looked at yet, after its folder was replaced by another index, or removed."""
    first = build(embeddings, tmp_path / "index", "--factory", "IVF16,Flat")
    before = search(first, queries(), 5)
    build(embeddings, tmp_path / "other", "--kind", "text")
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "other").rename(tmp_path / "index")
    other = load_index(tmp_path / "index")
    assert first.identity != other.identity == load_index(tmp_path / "index").identity
    assert first.item(0)["captions"] == ["image 0 0"]
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
    flat, graph, codes = (choose_factory(n, 512, m * gib) for n, m in ((50_000, 1), (1_000_000, 4), (1_000_000, 1)))
    assert [one.factory for one in (flat, graph, codes)] == ["Flat", "HNSW32", "OPQ64_512,IVF4096,PQ64np"]
    assert [one.effort for one in (flat, graph, codes)] == [None, 64, 64]
    assert "exact" in flat.why
    assert "2.1 GiB" in graph.why
    assert "from the disk" not in codes.why
    assert "from the disk" in choose_factory(1_000_000_000, 512, gib).why
    assert choose_factory(1_000_000_000, 1024, 500 * gib).factory == "OPQ64_512,IVF131072_HNSW32,PQ64np"
    for n in (1000, 10**9):
        assert n / cell_count(n) >= 39  # below, FAISS warns
        assert training_count(f"IVF{cell_count(n)},PQ8", n) >= min(n, 39 * cell_count(n))
    assert training_count("IVF131072,PQ8", 10**9, 512, gib) == gib // (8 * 513)
    for dim in (4, 17, 100, 1024):
        factory = choose_factory(10**9, dim, gib).factory
        assert new_index(width_of(dim, "csd", factory), factory).d == dim + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factory", "HNWS32"], "FAISS makes no index of 'HNWS32'"),
        (["--factory", "LSH"], "'LSH' does not rank by the Euclidean distance"),
        (["--factory", "PCA8,L2norm,IVF8,Flat"], "does not rank by the Euclidean distance"),
        (["--factory", "PCAW8,Flat"], "'PCAW8,Flat' does not rank by the Euclidean distance"),
        (["--factory", "IVF4096,Flat"], "cannot be made from 700 items"),
        (["--train-items", "701"], "--train-items is 701 of 700 items"),
        (["--part-items", "0"], "--part-items is 0"),
        (["--memory-gib", "1e9"], r"--memory-gib is 1e\+09, and this machine has .*use --factory"),
        (["--memory-gib", "1e-8"], "Parts of 1 items? .*at least --part-items 78"),
        (["--effort", "5"], "The index 'Flat' always searches everything"),
        (["--factory", "HNSW8", "--effort", str(10**30)], r"--effort is 1,000,.* of 700 items"),
        (["--form", "mean", "--tolerance", "-1"], "--form mean leaves the variances out"),
        (["--tolerance", "inf"], "--tolerance is inf"),
        (["--embeddings", "nowhere"], "There are no embeddings in nowhere"),
        (["--embeddings", "OTHER", "EMBEDDINGS"], r"embedded by runs/y \(e+, 16 dim.*by runs/x \(f+, 16 dim"),
        (["--embeddings", "EMBEDDINGS", "EMBEDDINGS"], "named twice"),
        (["--embeddings", "PARTLY", "--kind", "text"], "hold no text embeddings"),
        (["--embeddings", "PARTLY"], "image embeddings of .* are not complete"),
        (["--embeddings", "NAN"], "NaN or infinity"),
        (["--out", "there"], "there already exists"),
    ],
)
def test_what_cannot_be_built_is_refused(words, message, embeddings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tools.build_index.MAX_PARTS", 9)
    folders = {"EMBEDDINGS": embeddings.folder}
    for name, weights, shards in (("OTHER", "e", ["x"]), ("PARTLY", "f", ["x", "y"]), ("NAN", "f", ["x"])):
        made = create_embeddings(tmp_path / name, "runs/y", weights * 64, DIM)
        mean = np.full((1, DIM), np.nan if name == "NAN" else 1)
        made.write("image", "x", mean, np.ones(1), items(), {"shard": "x"})
        made.add_corpus("data", shards)
        folders[name] = made.folder
    (tmp_path / "there").mkdir()
    given = [] if "--embeddings" in words else ["--embeddings", str(embeddings.folder)]
    with pytest.raises(UserError, match=message):
        main([*given, "--out", "index", *(str(folders.get(w, w)) for w in words)])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["NAN", "OTHER", "PARTLY", "there"]


def test_what_is_there_so_far_can_be_taken(embeddings, tmp_path):
    made = create_embeddings(tmp_path / "partly", "runs/x", "f" * 64, DIM)
    made.write("image", "x", np.ones((1, DIM)), np.ones(1), items(), {"shard": "x"})
    made.add_corpus("data", ["x", "y"])
    index = build(embeddings, tmp_path / "index", "--embeddings", made.folder, "--incomplete")
    assert len(index) == 701
    assert index.item(700)["key"] == "0-0"


def test_another_query_or_model_is_refused(embeddings, tmp_path):
    index, q = build(embeddings, tmp_path / "index"), queries()
    require_model(index, "elsewhere/x", "f" * 64, DIM)
    for weights, dim in (("e" * 64, DIM), ("f" * 64, 8)):
        with pytest.raises(UserError, match=rf"made with runs/x \(f+, 16 .*model is runs/y \(\w+, {dim} dimensions"):
            require_model(index, "runs/y", weights, dim)
    with pytest.raises(UserError, match="NaN or infinity"):
        search(index, Gaussian(q.mean / 0, q.log_var), 3)


@pytest.mark.parametrize("name", ["x-00002.npz", "x-00003.parquet", "pickle"])
def test_damaged_embeddings_are_named(name, embeddings, tmp_path):
    copy = shutil.copytree(embeddings.folder, tmp_path / "x") / "image"
    if name == "x-00002.npz":
        os.truncate(copy / name, 900)
    elif name == "pickle":
        name = "x-00002.npz"
        with open(copy / name, "wb") as file:
            np.savez(file, mean=np.array([None] * 210, dtype=object), u=np.ones(210), about=np.array("{}"))
    else:
        shutil.copy(copy / "x-00002.parquet", copy / name)
    with pytest.raises(UserError, match=name.partition(".")[0]):
        main(["--embeddings", str(copy.parent), "--out", str(tmp_path / "index")])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_damaged_index_is_named(embeddings, tmp_path):
    build(embeddings, tmp_path / "index", "--part-items", 400)
    about = (tmp_path / "index" / "index.json").read_text()
    for message, name, content in (
        ("not readable JSON", "index.json", "{"),
        ("has the format 1, not 2", "index.json", json.dumps({"format": 1})),
        (r"00000.faiss holds 400 vectors of 20 dimensions, not 399", "index.json", about.replace("400", "399")),
        ("part-00001.faiss cannot be read", "part-00001.faiss", "x" * 1000),
        ("u.f32 cannot be read", "u.f32", "x" * 4 * 699),
        (r"0.parquet cannot be read", "items/0.parquet", "x" * 100),
    ):
        copy = shutil.copytree(tmp_path / "index", tmp_path / "spoilt")
        (copy / name).write_text(content)
        with pytest.raises(UserError, match=message):
            load_index(copy).item(0)
        shutil.rmtree(copy)


def test_a_build_that_was_killed_is_begun_anew_and_another_waited_for(embeddings, tmp_path):
    left = tmp_path / ".index.unfinished"
    (left / "items").mkdir(parents=True)
    (left / "part-00099.faiss").write_bytes(b"half")
    index = build(embeddings, tmp_path / "index")
    assert len(list((tmp_path / "index").glob("part-*"))) == len(index.parts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    with folder._aside(tmp_path / "other"), pytest.raises(UserError, match=r"Another command builds .*other"):
        build(embeddings, tmp_path / "other")


@pytest.mark.parametrize("room", [8000, "all but the last bytes of a part"])
def test_a_full_disk_leaves_nothing(room, embeddings, tmp_path):
    words = ["--embeddings", str(embeddings.folder), "--factory", "Flat", "--part-items", "400"]
    if room != 8000:
        assert main([*words, "--out", str(tmp_path / "whole")]) == 0
        room = (tmp_path / "whole" / "part-00000.faiss").stat().st_size // 4096 * 4096
        shutil.rmtree(tmp_path / "whole")
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(UserError, match=r"The index cannot be written to .*: File too large"):
            main([*words, "--out", str(tmp_path / "index")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
