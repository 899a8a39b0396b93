"""python -m tools.embed on real tars with a real model."""

import io
import os
import resource
import shutil
import signal
import tarfile
import time

import numpy as np
import pytest
import torch

from probemb.data.images import decode_image
from probemb.data.scenes import scene
from probemb.data.shards.index import Shard, file_sha256, write_index
from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model, weights_sha256
from probemb.search.embeddings import open_embeddings
from tests.embedding import contents, corpus, items, options, start, whole  # noqa: F401 - fixtures
from tests.shards import iterate_samples
from tests.world import jpeg, run_folder, write_tar  # noqa: F401 - a fixture
from tools.embed.command import main


def test_embeddings_are_those_of_a_plain_loop(whole, corpus, run_folder):  # noqa: F811
    model, tokenizer, transforms = load_model(run_folder)
    samples = [sample for tar in sorted(corpus.glob("*.tar")) for sample in iterate_samples(tar)]
    with torch.inference_mode():
        images = [model.encode_image(transforms.evaluate(decode_image(s.image))[None]) for s in samples]
        texts = [(s, i, model.encode_text(tokenizer([c]))) for s in samples for i, c in enumerate(s.captions)]
    embeddings = open_embeddings(whole)
    assert items(whole) == {"image": 24, "text": len(texts)} == {"image": 24, "text": 46}
    assert (embeddings.dim, embeddings.weights) == (16, weights_sha256(model))
    for kind, expected in ("image", images), ("text", [g for _, _, g in texts]):
        parts = [embeddings.read(part) for part in embeddings.partitions(kind)]
        mean, u = (np.concatenate(arrays) for arrays in zip(*parts))
        assert (mean.dtype, u.dtype) == (np.float16, np.float32)
        np.testing.assert_allclose(mean, torch.cat([g.mean for g in expected]), atol=1e-3)
        np.testing.assert_allclose(u, torch.cat([g.uncertainty() for g in expected]), rtol=1e-5)
    rows = [row for part in embeddings.partitions("image") for row in embeddings.read_items(part).to_pylist()]
    assert [(row["key"], row["captions"]) for row in rows] == [(s.key, s.captions) for s in samples]
    for row, sample in zip(rows, samples):
        with open(row["shard"], "rb") as tar:
            tar.seek(row["offset"])
            assert tar.read(row["size"]) == sample.image
    assert not any(row["url"] for row in rows)
    rows = [row for part in embeddings.partitions("text") for row in embeddings.read_items(part).to_pylist()]
    assert [(r["key"], r["captions"], r["number"]) for r in rows] == [(s.key, [s.captions[i]], i) for s, i, _ in texts]
    assert not list(whole.rglob(".*"))


@pytest.mark.parametrize("more", [("--workers", 2), ("--items", "image"), ("--items", "text")])
def test_the_same_bytes_however_they_are_read(more, whole, corpus, run_folder, tmp_path):  # noqa: F811
    assert main(options(run_folder, corpus, tmp_path / "out", *more)) == 0
    expected = contents(whole)
    if "--items" in more:
        expected = {name: content for name, content in expected.items() if name.startswith(more[1])}
    assert contents(tmp_path / "out") == expected
    assert set(items(tmp_path / "out")) == ({more[1]} if "--items" in more else {"image", "text"})


def test_several_processes_share_the_shards(whole, corpus, run_folder, tmp_path):  # noqa: F811
    argv = options(run_folder, corpus, tmp_path / "out")
    ranks = [start([*argv, "--part", "1/2"], RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert {name.partition(".")[0] for name in contents(tmp_path / "out")} == {
        f"{kind}/corpus-0000{number}" for kind in ("image", "text") for number in (0, 1)
    }
    assert items(tmp_path / "out") == {}
    assert main(argv) == 0
    assert contents(tmp_path / "out") == contents(whole)
    assert items(tmp_path / "out") == items(whole)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, 0), (signal.SIGTERM, 2)])
def test_a_run_that_was_ended_goes_on(number, workers, whole, corpus, run_folder, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    process = start(options(run_folder, corpus, out, "--batch-size", 1, "--workers", workers), prepare=slow)
    deadline = time.monotonic() + 60
    while not list(out.glob("text/*.done.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, number)  # as Slurm does: the workers get it, too
    process.join(30)
    assert process.exitcode == (-9 if number == signal.SIGKILL else 85)
    done = {file: file.stat().st_mtime_ns for file in out.rglob("*.done.json")}
    assert 2 <= len(done) < 8
    (out / "image" / "corpus-00003.npz").write_bytes(b"half")  # what a machine that loses its power may leave
    assert main(options(run_folder, corpus, out, "--batch-size", 1)) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    found, expected = contents(out), contents(whole)
    assert found.keys() >= expected.keys()
    for name in expected:
        if name.endswith(".json"):
            assert found[name] == expected[name]
    assert items(out) == {"image": 24, "text": 46}


def slow():
    """Leaves time for a signal between two batches."""
    from tools.embed import command as embed

    quick = embed.note
    embed.note = lambda *args: (time.sleep(0.05), quick(*args))


def test_a_shard_that_has_changed_is_embedded_again(whole, corpus, run_folder, tmp_path):  # noqa: F811
    data, out = tmp_path / "corpus", tmp_path / "out"
    for number in range(2):
        write_tar(data / f"{number}.tar", [("a.jpg", jpeg(scene("embed", number))), ("a.txt", b"one")])
    assert main(options(run_folder, data, out)) == 0
    before = contents(out)
    write_tar(
        data / "1.tar", [(f"{k}{e}", d) for k in "ab" for e, d in ((".jpg", jpeg(scene("new", 1))), (".txt", b"x"))]
    )
    assert main(options(run_folder, data, out)) == 0
    after = contents(out)
    assert items(out) == {"image": 3, "text": 3}
    assert {name for name in before if before[name] != after[name]} == {name for name in before if "corpus-1" in name}
    os.utime(data / "0.tar")
    written = (out / "image" / "corpus-0.npz").stat().st_mtime_ns
    assert main(options(run_folder, data, out)) == 0
    assert (out / "image" / "corpus-0.npz").stat().st_mtime_ns == written
    assert main(options(run_folder, corpus, out)) == 0  # a second corpus in the same folder
    assert items(out) == {"image": 27, "text": 49}


def test_another_content_with_the_same_names_sizes_and_time_is_embedded_again(run_folder, tmp_path):  # noqa: F811
    data, out = tmp_path / "corpus", tmp_path / "out"
    write_tar(data / "0.tar", [("a.jpg", jpeg(scene("embed", 0))), ("a.txt", b"one red circle")])
    assert main(options(run_folder, data, out)) == 0
    before, times = contents(out), (data / "0.tar").stat()
    write_tar(data / "0.tar", [("a.jpg", jpeg(scene("embed", 0))), ("a.txt", b"two red circle")])
    os.utime(data / "0.tar", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (data / "0.tar").stat().st_size == times.st_size
    assert main(options(run_folder, data, out)) == 0
    after = contents(out)
    assert before["text/corpus-0.npz"] != after["text/corpus-0.npz"]


def test_what_happens_to_one_corpus_or_kind_does_not_concern_another(corpus, run_folder, tmp_path):  # noqa: F811
    out, data = tmp_path / "out", tmp_path / "gone"
    write_tar(data / "0.tar", [("a.jpg", jpeg(scene("embed", 1))), ("a.txt", b"one")])
    assert main(options(run_folder, data, out)) == 0
    write_index(data, [Shard("0.tar", data / "0.tar", 1, (data / "0.tar").stat().st_size)])
    (data / "0.tar").unlink()  # the index stays
    assert main(options(run_folder, corpus, out, "--items", "image")) == 0
    assert items(out) == {"image": 25}
    process = start(options(run_folder, corpus, out, "--batch-size", 1), prepare=slow)  # the captions of it
    while not (out / "text" / "corpus-00000.done.json").exists():
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert items(out) == {"image": 25}
    assert open_embeddings(out).corpora == {
        str(data): ["gone-0"], str(corpus): [f"corpus-{number:05d}" for number in range(4)]
    }  # fmt: skip


def test_shards_that_are_gone_are_in_no_index(corpus, run_folder, tmp_path, capsys):  # noqa: F811
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(corpus, data)
    argv = options(run_folder, data, out)
    assert main(argv) == 0
    before = items(out)
    tars = sorted(data.glob("*.tar"))
    gone = open_embeddings(out).partitions("image")[0]
    tars[0].unlink()
    (data / "index.json").unlink(missing_ok=True)
    assert main(argv) == 0
    assert f"1 shards are no longer in the data, and their images in no index: {gone.name}" in capsys.readouterr().out
    assert items(out)["image"] == before["image"] - gone.count
    assert gone.name not in [part.name for part in open_embeddings(out).partitions("image")]


def test_a_shard_that_is_replaced_while_it_is_read_is_damaged(corpus, run_folder, tmp_path, monkeypatch):  # noqa: F811
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    (data / "index.json").unlink(missing_ok=True)
    tar = sorted(data.glob("*.tar"))[0]

    def replaced(file):
        if file == tar:
            shutil.copy(file, tmp_path / "other.tar")
            os.replace(tmp_path / "other.tar", file)
        return "0" * 64

    monkeypatch.setattr("tools.embed.reading.file_sha256", replaced)
    argv = options(run_folder, data, tmp_path / "out", "--workers", "0")
    with pytest.raises(UserError, match="was changed while it was read"):
        main(argv)
    assert main([*argv, "--skip-damaged"]) == 0  # the next command embeds it
    assert [part.name for part in open_embeddings(tmp_path / "out").partitions("image")] == [
        f"data-{one.stem}" for one in sorted(data.glob("*.tar"))[1:]
    ]


def test_a_shard_of_another_hash_than_its_index_says_is_damaged(run_folder, tmp_path):  # noqa: F811
    data = tmp_path / "data"
    tar = write_tar(data / "0.tar", [("a.jpg", jpeg(scene("p", 1))), ("a.txt", b"one red circle")])
    write_index(data, [Shard(tar.name, tar, 1, tar.stat().st_size, file_sha256(tar))])
    tar.write_bytes(tar.read_bytes().replace(b"one red circle", b"two red circle"))
    with pytest.raises(UserError, match="another SHA-256"):
        main(options(run_folder, data, tmp_path / "out"))
    write_index(data, [Shard(tar.name, tar, 1, tar.stat().st_size, file_sha256(tar))])
    assert main(options(run_folder, data, tmp_path / "out")) == 0


def test_captions_without_measure(run_folder, tmp_path):  # noqa: F811
    good = jpeg(scene("p", 1))
    many = "\n".join(["word"] * 1001).encode()
    members = [("a.jpg", good), ("a.txt", b"good"), ("b.jpg", good), ("b.txt", many)]
    write_tar(tmp_path / "many" / "0.tar", members)
    argv = options(run_folder, tmp_path / "many", tmp_path / "out", "--max-bad", "0.5")
    assert main(argv) == 0
    assert items(tmp_path / "out") == {"image": 1, "text": 1}


def test_data_that_is_named_twice_is_all_embedded(corpus, run_folder, tmp_path):  # noqa: F811
    write_tar(tmp_path / "more" / "x.tar", [("a.jpg", jpeg(scene("p", 1))), ("a.txt", b"good")])
    argv = [*options(run_folder, corpus, tmp_path / "out"), "--data", str(tmp_path / "more")]
    assert main(argv) == 0
    assert items(tmp_path / "out")["image"] == 25


def test_a_link_that_leads_nowhere(corpus, run_folder, tmp_path):  # noqa: F811
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "0.tar").symlink_to(corpus / "00000.tar")
    (data / "1.tar").symlink_to(tmp_path / "nowhere.tar")
    with pytest.raises(UserError, match=r"1 shard is not embedded .*1\.tar: cannot be opened"):
        main(options(run_folder, data, out))
    assert main(options(run_folder, data, out, "--skip-damaged")) == 0
    assert items(out)["image"] == 6
    (tmp_path / "nowhere.tar").symlink_to(corpus / "00001.tar")
    assert main(options(run_folder, data, out)) == 0
    assert items(out)["image"] == 12


def test_a_range_of_which_some_is_not_there(corpus, run_folder, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match=r"2 of the 3 names in .* do not exist, .*/00004\.tar for one"):
        main(options(run_folder, f"{corpus}/{{00003..00005}}.tar", tmp_path / "out"))
    with pytest.raises(UserError, match="does not exist"):
        main(options(run_folder, f"{corpus}/{{00004..00005}}.tar", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_index_of_something_else_beside_the_shards(corpus, run_folder, tmp_path):  # noqa: F811
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    (data / "index.json").write_text("{}")
    assert main(options(run_folder, data / "*.tar", tmp_path / "out")) == 0
    assert items(tmp_path / "out") == {"image": 24, "text": 46}


def test_what_cannot_be_used_is_left_out_and_counted(run_folder, tmp_path):  # noqa: F811
    good = jpeg(scene("embed", 1))
    members = [
        ("a.jpg", b"<html>not found</html>"), ("a.txt", b"no picture"),
        ("b.jpg", good), ("b.txt", b"\xff\xfe no text"),
        ("c.jpg", good[: len(good) // 3]), ("c.txt", b"cut off"),
        ("d.jpg", good), ("d.json", b'{"captions": ["lone \\ud800 half", "fine"]}'),
        ("e.jpg", good), ("e.json", b'{"captions": 7}'),
        ("f.jpg", b""), ("f.txt", b"empty"),
        ("g.jpg", good), ("g.txt", b"good"),
    ]  # fmt: skip
    write_tar(tmp_path / "bad" / "0.tar", members)
    write_tar(tmp_path / "bad" / "1.tar", [("a.jpg", good), ("a.txt", b"good")])
    (tmp_path / "bad" / "2.tar").write_bytes((tmp_path / "bad" / "1.tar").read_bytes()[:1024])
    (tmp_path / "bad" / "3.tar").write_bytes(b"PK\x03\x04 no tar at all" * 100)
    argv = options(run_folder, tmp_path / "bad", tmp_path / "out")
    with pytest.raises(UserError, match=r"3 shards are not embedded .*5 of 7 samples.*2\.tar: cut off") as caught:
        main(argv)
    assert "--skip-damaged" in caught.value.remedy
    assert items(tmp_path / "out") == {}
    assert len(list((tmp_path / "out").rglob("*.done.json"))) == 2
    assert main([*argv, "--skip-damaged"]) == 0
    embeddings = open_embeddings(tmp_path / "out")
    assert items(tmp_path / "out") == {"image": 3, "text": 6}
    rows = [row for part in embeddings.partitions("image") for row in embeddings.read_items(part).to_pylist()]
    assert [(row["key"], row["captions"]) for row in rows] == [
        ("d", ["lone \\ud800 half", "fine"]), ("g", ["good"]), ("a", ["good"])
    ]  # fmt: skip
    marker = embeddings.marker("image", "bad-0")
    assert marker["failures"]["the image cannot be decoded (UnidentifiedImageError)"] == 1
    assert sum(count for cause, count in marker["failures"].items() if not cause.startswith("the shard")) == 5
    assert {row["key"] for row in marker["examples"]} == set("abcef")
    assert all(embeddings.marker("text", f"bad-{i}")["failures"].popitem()[0].startswith("the shard ") for i in (2, 3))


def test_images_and_captions_do_not_need_each_other(run_folder, tmp_path):  # noqa: F811
    write_tar(tmp_path / "a" / "0.tar", [("a.png", b"not read"), ("a.txt", b"one\ntwo")])
    assert main(options(run_folder, tmp_path / "a", tmp_path / "out", "--items", "text")) == 0
    assert items(tmp_path / "out") == {"text": 2}
    good = jpeg(scene("embed", 1))
    members = [("a.jpg", good), ("b.jpg", good), ("b.json", b'{"labels": [3]}'), ("c.txt", b"no image")]
    write_tar(tmp_path / "b" / "0.tar", members)
    assert main(options(run_folder, tmp_path / "b", tmp_path / "both")) == 0
    embeddings = open_embeddings(tmp_path / "both")
    assert items(tmp_path / "both") == {"image": 2, "text": 0}
    assert embeddings.read_items(embeddings.partitions("image")[0])["captions"].to_pylist() == [[], []]
    assert embeddings.marker("image", "b-0")["without_image"] == 1


def test_names_that_are_no_text(run_folder, tmp_path):  # noqa: F811
    data = tmp_path / "a"
    data.mkdir()
    with tarfile.open(data / "0.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name, content in ("über.jpg", jpeg(scene("embed", 1))), ("über.txt", b"one"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert main(options(run_folder, data, tmp_path / "out")) == 0
    embeddings = open_embeddings(tmp_path / "out")
    (part,) = embeddings.partitions("image")
    assert embeddings.read_items(part)["key"].to_pylist() == ["\\udcfcber"]


def test_a_full_disk(corpus, run_folder, tmp_path):  # noqa: F811
    def small():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))  # ends the writing of a file in its middle

    process = start(options(run_folder, corpus, tmp_path / "out"), prepare=small)
    process.join(60)
    assert process.exitcode == 2
    left = [file.parent.name for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert sorted(left) == ["corpora", "out"]  # what describes the folder
    assert main(options(run_folder, corpus, tmp_path / "out")) == 0


def test_what_cannot_run_is_refused(whole, corpus, run_folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    save_model(create_model("ViT-Micro-32", embed_dim=24), tmp_path / "other")
    save_model(create_model("ViT-Micro-32", head="pie", n_embeddings=2, embed_dim=8), tmp_path / "several")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    write_tar(tmp_path / "elsewhere" / "corpus" / "00000.tar", [("a.jpg", jpeg(scene("e", 1))), ("a.txt", b"one")])
    before = contents(whole)
    cases = [
        (options("other", corpus, whole), rf"{run_folder} \(\w+, 16 dim.*, not of {tmp_path}/other \(\w+, 24 dim"),
        (options("several", corpus, "out"), "The model several has 2 embeddings of an item"),
        (options(run_folder, "nowhere", "out"), "The data path nowhere does not exist"),
        (options(run_folder, "empty", "out"), "The data path empty holds no webdataset shards"),
        (options(run_folder, "file", "out"), "The data path file holds no webdataset shards"),
        (options(run_folder, "s4://bucket/corpus", "out"), "'s4:' is not a known source"),
        (options(run_folder, corpus, "full"), "full holds other files"),
        (options(run_folder, corpus, "file"), "--out file is a file"),
        (options("nowhere", corpus, "out"), "There is no model"),
        (options(run_folder, corpus, "out", "--part", "3/2"), "--part 3/2 is not a part"),
        (options(run_folder, corpus, "out", "--batch-size", "0"), "--batch-size is 0"),
        (options(run_folder, corpus, "out", "--max-bad", "2"), "--max-bad is 2"),
        (options(run_folder, corpus, "out", "--max-bad", "nan"), "--max-bad is nan"),
        *((options(run_folder, corpus, "out", "--cache-gib", x), f"--cache-gib is {x}") for x in ("nan", "inf", "-1")),
        (options(run_folder, corpus, "out", "--batch-size", str(10**30)), "from 1 to 1,000,000"),
        (options(run_folder, corpus, "out", "--text-batch-size", "-1"), "--text-batch-size is -1"),
        (options(run_folder, corpus, "out", "--workers", "1000000"), "--workers is 1000000"),
        (options(run_folder, corpus, "out", "--items", "all"), "invalid choice: 'all'"),
        (options(run_folder, corpus, "out", "--device", "cuda") if not torch.cuda.is_available() else
         options(run_folder, corpus, "out", "--device", "cuda:99"), "was asked for"),
        ([*options(run_folder, corpus, "out"), "--data", str(corpus), "elsewhere/corpus"], "the same folder name"),
        (options(run_folder, "elsewhere/corpus", whole), "has embeddings of .* under the name corpus-00000"),
        (options(run_folder, corpus, "out")[2:], "--model"),
    ]  # fmt: skip
    for argv, message in cases:
        with pytest.raises(UserError, match=message):
            main(argv)
    assert not (tmp_path / "out").exists()
    assert contents(whole) == before
    assert items(whole) == {"image": 24, "text": 46}
