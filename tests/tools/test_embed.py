"""python -m tools.embed on real tars with a real model, from here and from a web server."""

import signal
import tempfile
import time

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.data.images import decode_image
from probemb.data.remote import Remote
from probemb.data.shards.index import Shard, write_index
from probemb.errors import UserError
from probemb.models import load_model, weights_sha256
from probemb.search.embeddings import KINDS, open_embeddings
from tests.jobs import Job
from tests.searching import open_searcher
from tests.webserver import serve
from tests.world import encode, iterate_samples, jpeg, save, shade, write_samples, write_tar
from tools.build_index import main as build
from tools.embed import main, partition_name
from tools.make_scenes.world import scene
from tools.search.query import QueryImage, read_picture

PER_SHARD = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four shards of six scenes, with one to three captions each, and their index; the third has a sample without."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    rows = []
    for number in range(4):
        samples = []
        for i in range(PER_SHARD):
            captions = [f"caption {number} {i} {j} {'word ' * 5 * j}" for j in range(1 + i % 3)]
            text = {"cls": "3"} if (number, i) == (2, 4) else {"txt": "\n".join(captions)}
            samples.append({"jpg": jpeg(scene("embed", 10 * number + i)), **text})
        path = write_samples(folder / f"{number:05d}.tar", samples)
        rows.append(Shard(path.name, path, PER_SHARD, path.stat().st_size))
    write_index(folder, rows)
    return folder


@pytest.fixture(scope="module")
def whole(corpus, run_folder, tmp_path_factory):
    """The corpus, embedded in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(options(run_folder, corpus, out)) == 0
    return out


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Folder of fetched shards; it is empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.glob("probemb*"))


def options(model, data, out, *more):
    return ["--model", str(model), "--data", str(data), "--out", str(out), "--batch-size", "4", *map(str, more)]


def items(folder):
    """Number of complete items of each kind."""
    embeddings = open_embeddings(folder)
    return {kind: count for kind in KINDS if (count := embeddings.count(kind)) is not None}


def contents(folder):
    """mean and u of every partition, as bytes, by its kind and the name of its shard."""
    found = open_embeddings(folder)
    parts = [part for kind in KINDS for part in found.partitions(kind)]
    return {(p.kind, p.about["shard"].rpartition("/")[2]): [a.tobytes() for a in found.read(p)] for p in parts}


def test_embeddings_are_those_of_a_plain_loop(whole, corpus, run_folder):
    model, tokenizer, transforms = load_model(run_folder)
    samples = list(iterate_samples(corpus))
    with torch.inference_mode():
        images = [model.encode_image(transforms.evaluate(decode_image(s.image))[None]) for s in samples]
        texts = [(s, i, model.encode_text(tokenizer([c]))) for s in samples for i, c in enumerate(s.captions)]
    embeddings = open_embeddings(whole)
    assert items(whole) == {"image": 24, "text": len(texts)} == {"image": 24, "text": 46}
    assert (embeddings.dim, embeddings.weights) == (16, weights_sha256(model))
    for kind, expected in ("image", images), ("text", [g for _, _, g in texts]):
        mean, u = (np.concatenate(a) for a in zip(*(embeddings.read(part) for part in embeddings.partitions(kind))))
        assert (mean.dtype, u.dtype) == (np.float16, np.float32)
        np.testing.assert_allclose(mean, torch.cat([g.mean for g in expected]), atol=1e-3)
        np.testing.assert_allclose(u, torch.cat([g.uncertainty() for g in expected]), rtol=1e-5)
    rows = [row for part in embeddings.partitions("image") for row in embeddings.read_items(part).to_pylist()]
    assert [(row["key"], row["captions"]) for row in rows] == [(s.key, s.captions) for s in samples]
    assert [read_picture(row["shard"], row["offset"], row["size"]) for row in rows] == [s.image for s in samples]
    rows = [row for part in embeddings.partitions("text") for row in embeddings.read_items(part).to_pylist()]
    assert [(r["key"], r["captions"], r["number"]) for r in rows] == [(s.key, [s.captions[i]], i) for s, i, _ in texts]


def test_texts_alone_are_the_same(whole, corpus, run_folder, tmp_path):
    assert main(options(run_folder, corpus, tmp_path / "out", "--items", "text")) == 0
    assert contents(tmp_path / "out") == {name: data for name, data in contents(whole).items() if name[0] == "text"}


def test_a_folder_of_pictures_without_captions(run_folder, tmp_path, capsys):
    pictures = tmp_path / "photos"
    for i in range(7):
        save(pictures / "2024" / f"{i}.PNG", shade(i))
    save(pictures / "notes.gif", b"")
    with pytest.raises(UserError, match=r"1 of 8 images of .*photos cannot be used \(notes.gif: it is no JPEG"):
        main(options(run_folder, pictures, tmp_path / "out", "--items", "image"))
    assert main(options(run_folder, pictures, tmp_path / "out", "--items", "image", "--max-bad", "0.2")) == 0
    assert "1 image left out: notes.gif" in capsys.readouterr().out
    assert items(tmp_path / "out") == {"image": 7}


def test_several_commands_share_the_shards(whole, corpus, run_folder, tmp_path, monkeypatch):
    argv = options(run_folder, corpus, tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([*argv, "--part", "1/2"]) == 0
    assert {name for _, name in contents(tmp_path / "out")} == {"00001.tar"}  # the second of four shares
    assert items(tmp_path / "out") == {}
    monkeypatch.undo()
    assert main(argv) == 0
    assert contents(tmp_path / "out") == contents(whole)


def test_a_signal_ends_it_and_a_repeated_command_goes_on(whole, corpus, run_folder, tmp_path):
    out = tmp_path / "out"
    with serve(corpus) as site:
        site.troubles = {"00002.tar": ["silence"]}
        argv = options(run_folder, f"{site.address}/corpus", out)
        job = Job(lambda: main(argv), {}, ranks=0, output=tmp_path / "log")
        while not list(out.glob("text/corpus-00001-*.npz")):
            assert not job.poll(), job.text()
            time.sleep(0.01)
        job.signal(signal.SIGTERM)
        assert job.wait(20) == [85]  # before the silence of 30 seconds ends
        done = {file: file.stat().st_mtime_ns for file in out.rglob("*.npz")}
        assert len(done) == 4
        assert main(argv) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert contents(out) == contents(whole)


def test_a_shard_that_has_changed_is_refused_until_it_is_deleted(corpus, run_folder, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"

    def write(number, key):
        return write_tar(data / f"{number}.tar", [("a.jpg", jpeg(scene(key, number))), ("a.txt", b"one")])

    first, _ = [write(number, "x") for number in range(2)]
    assert main(options(run_folder, data, out)) == 0
    before = contents(out)
    write(1, "y")
    with pytest.raises(UserError, match=r"2 partitions of .* have changed .* image/data-1-\w+\.npz, text/data-1-"):
        main(options(run_folder, data, out))
    for file in out.glob("*/data-1-*.npz"):
        file.unlink()
    assert main(options(run_folder, data, out)) == 0
    assert {name for name in before if contents(out)[name] != before[name]} == {("image", "1.tar")}
    assert main(options(run_folder, corpus, out)) == 0  # a second corpus in the same folder
    assert items(out) == {"image": 26, "text": 48}
    first.unlink()
    assert main(options(run_folder, data, out)) == 0
    assert items(out) == {"image": 25, "text": 47}  # what is gone is in no index


def test_what_cannot_be_used_is_left_out_and_counted(run_folder, tmp_path):
    good = jpeg(scene("embed", 1))
    members = [
        ("a.jpg", b"<html>not found</html>"), ("a.txt", b"no picture"),
        ("b.jpg", good), ("b.txt", b"\xff\xfe no text"),
        ("c.jpg", good[: len(good) // 3]), ("c.txt", b"cut off"),
        ("d.jpg", good), ("d.json", b'{"captions": ["lone \\ud800 half", "fine"]}'),
        ("e.jpg", good), ("e.txt", "\n".join(["word"] * 1001).encode()),
        ("f.jpg", b""), ("f.txt", b"empty"),
        ("g.jpg", good), ("g.txt", b"good"),
    ]  # fmt: skip
    write_tar(tmp_path / "bad" / "0.tar", members)
    write_tar(tmp_path / "bad" / "1.tar", [("a.jpg", good), ("a.txt", b"good")])
    (tmp_path / "bad" / "2.tar").write_bytes((tmp_path / "bad" / "1.tar").read_bytes()[:1024])
    (tmp_path / "bad" / "3.tar").symlink_to(tmp_path / "nowhere")
    argv = options(run_folder, tmp_path / "bad", tmp_path / "out")
    told = r"3 shards are not embedded .*5 of 7 samples.*2\.tar: cut off.*cannot be opened"
    with pytest.raises(UserError, match=told):
        main(argv)
    assert items(tmp_path / "out") == {}
    assert {name for _, name in contents(tmp_path / "out")} == {"1.tar"}
    assert main([*argv, "--skip-damaged"]) == 0
    embeddings = open_embeddings(tmp_path / "out")
    assert items(tmp_path / "out") == {"image": 3, "text": 6}
    rows = [row for part in embeddings.partitions("image") for row in embeddings.read_items(part).to_pylist()]
    assert [(row["key"], row["captions"]) for row in rows] == [
        ("d", ["lone \\ud800 half", "fine"]), ("g", ["good"]), ("a", ["good"])
    ]  # fmt: skip
    write_tar(tmp_path / "nowhere", [("a.jpg", good), ("a.txt", b"good")])
    assert main([*argv, "--skip-damaged"]) == 0  # what could not be read is tried again
    assert items(tmp_path / "out") == {"image": 4, "text": 7}


def test_a_folder_its_index_and_its_queries_keep_their_resize_backend(run_folder, tmp_path):
    rng = np.random.default_rng(0)  # noise: on which PIL and torch differ most
    noise = Image.fromarray(rng.choice(np.array([0, 255], np.uint8), (60, 45, 3)))
    data = encode(noise, "PNG")
    write_tar(tmp_path / "data" / "00000.tar", [("0.png", data)])
    expected = {}
    for resize in ("pil", "tensor"):
        model, _, transforms = load_model(run_folder, resize=resize)
        with torch.inference_mode():
            expected[resize] = model.encode_image(transforms.evaluate(noise)[None]).mean.numpy()
    apart = np.abs(expected["pil"] - expected["tensor"]).max()
    for resize, other in (("pil", "tensor"), ("tensor", "pil")):
        argv = options(run_folder, tmp_path / "data", tmp_path / resize, "--items", "image")
        assert main([*argv, "--resize", resize, "--mean-dtype", "float32"]) == 0
        embeddings = open_embeddings(tmp_path / resize)
        found = embeddings.read(embeddings.partitions("image")[0])[0]
        np.testing.assert_allclose(found, expected[resize], atol=apart / 20)
        with pytest.raises(UserError, match=f"--resize {resize}\\), not .*--resize {other}"):
            main([*argv, "--resize", other])
        assert build(["--embeddings", str(tmp_path / resize), "--out", str(tmp_path / f"index-{resize}")]) == 0
        query = open_searcher(tmp_path / f"index-{resize}").encoder.embed([], [QueryImage("x", lambda: data)])
        np.testing.assert_allclose(query.mean.numpy(), expected[resize], atol=apart / 20)


def test_shards_of_a_web_server(corpus, whole, run_folder, tmp_path, capfd):
    out = tmp_path / "out"
    with serve(corpus) as site:
        site.troubles = {"00001.tar": ["cut"], "00002.tar": [503]}
        source = f"{site.address}/corpus?key=secret".replace("//", "//me:hush@")
        assert main(options(run_folder, source, out, "--workers", 2)) == 0
        assert contents(out) == contents(whole)
        assert items(out) == items(whole)
        said = [file.read_bytes() for file in out.rglob("*.*") if file.is_file()] + [str(capfd.readouterr()).encode()]
        assert not any(secret in text for text in said for secret in (b"secret", b"hush"))
        row = open_embeddings(out).read_items(open_embeddings(out).partitions("image")[3]).to_pylist()[4]
        assert row["shard"] == f"{site.address}/corpus/00003.tar"
        image = [sample.image for sample in iterate_samples(corpus / "00003.tar")][4]
        assert read_picture(row["shard"], row["offset"], row["size"]) == image
        site.requests.clear()
        assert main(options(run_folder, source, out)) == 0
        assert [name for name, _ in site.requests] == ["index.json"]  # nothing is fetched again


def test_names_of_partitions_lead_nowhere():
    for address, name, expected in (
        ("https://host/cc3m/00000.tar?key=a/b", "00000.tar", "cc3m-00000"),
        ("https://host/../00000.tar", "00000.tar", "..-00000"),
        ("pipe:ssh host cat 'data/cc 3m/00000.tar' | tee x", "00000.tar", "3m-00000"),
        ("https://host/cc3m/" + "n" * 300 + ".tar", "n" * 300 + ".tar", "cc3m-" + "n" * 55),
    ):
        found, _, digest = partition_name(Shard(name, Remote(address), 1, 1)).rpartition("-")
        assert found == expected, address
        assert len(digest) == 8
