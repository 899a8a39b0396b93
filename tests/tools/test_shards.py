"""The index, what training would stumble over, new shards of what can be read in damaged ones, and of own pictures."""

import json

import pytest

from probemb.data.captions.find import find_captions
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.pretrain.stream.test_stream import make, take, write_corpus, write_shard
from tests.world import jpeg, picture, save, shade, which, write_tar
from tools.make_scenes.world import class_scene
from tools.shards import main

IMAGE = jpeg(class_scene("test", 0))


@pytest.fixture
def sound(tmp_path):
    write_corpus(tmp_path / "data", sizes=(8,) * 8)
    assert main(["index", str(tmp_path / "data"), "--workers", "1"]) == 0
    return tmp_path / "data"


def verify(folder, tmp_path, *words) -> tuple[int, dict]:
    code = main(["verify", str(folder), "--workers", "2", "--report", str(tmp_path / "report.json"), *words])
    return code, json.loads((tmp_path / "report.json").read_text())


def test_index(tmp_path):
    parts = [(f"{i}.{ext}", data) for i in range(3) for ext, data in (("jpg", IMAGE), ("txt", b"a"))]
    write_tar(tmp_path / "0.tar", parts)
    write_tar(tmp_path / "1.tar", [*parts[:4], ("alone.jpg", IMAGE), ("words.txt", b"a"), ("README", b"x")])
    main(["index", str(tmp_path), "--workers", "2"])
    assert [(shard.name, shard.samples) for shard in read_index(tmp_path)] == [("0.tar", 3), ("1.tar", 2)]
    (tmp_path / "0.tar").unlink()
    main(["index", str(tmp_path), "--workers", "1"])  # brings it up to date
    assert [shard.name for shard in read_index(tmp_path)] == ["1.tar"]


def test_damaged_tars_stop_it_before_anything_is_written(sound):
    (sound / "00001.tar").write_bytes((sound / "00001.tar").read_bytes()[:1500])
    (sound / "00008.tar").write_bytes(b"<html>503</html>" * 100)
    before = (sound / "index.json").read_bytes()
    with pytest.raises(UserError, match="2 of 9 shards"):
        main(["index", str(sound)])
    assert (sound / "index.json").read_bytes() == before
    assert main(["index", str(sound), "--skip-damaged"]) == 0
    assert [int(shard.name[:5]) for shard in read_index(sound)] == [0, 2, 3, 4, 5, 6, 7]


@pytest.mark.chaos
def test_verify_finds_what_training_finds(sound, tmp_path, capsys):
    assert verify(sound, tmp_path) == (
        0, {"folder": str(sound), "shards": 8, "samples": 64, "lost": 0, "damaged": []},
    )  # fmt: skip
    shards, index = read_index(sound), (sound / "index.json").read_bytes()
    bad = {0: {1: "image", 4: "caption"}, 1: {2: "encoding", 3: "zero bytes"}, 2: {0: "bomb"}, 3: {5: "name"}}
    for shard, kinds in bad.items():
        write_shard(sound / f"{shard:05d}.tar", 8, kinds)
    (sound / "00004.tar").write_bytes((sound / "00004.tar").read_bytes()[:5000])
    (sound / "00005.tar").write_bytes(b"")
    write_shard(sound / "00006.tar", 5)
    last = bytearray((sound / "00007.tar").read_bytes())
    last[last.index(b"caption")] ^= 1  # a letter of a caption, which no decoder would miss
    (sound / "00007.tar").write_bytes(last)
    code, report = verify(sound, tmp_path)
    assert code == 1
    assert (sound / "index.json").read_bytes() == index
    with make(shards, failure_share=1) as stream:  # one epoch, nothing is dropped
        take(stream, 8)
    assert {row["name"]: row["lost"] for row in report["damaged"]} == {
        "00007.tar": 0, **{name: failure.count for name, failure in stream.failures.items()}
    }  # fmt: skip
    assert report["lost"] == 6 + 8 + 8 + 8
    by_name = {row["name"]: row for row in report["damaged"]}
    assert {(int(name[:5]), one["index"]) for name, row in by_name.items() for one in row["bad_samples"]} == {
        (shard, number) for shard, kinds in bad.items() for number in kinds
    }
    assert "holds 5 samples, but its index says 8" in by_name["00006.tar"]["damage"]
    assert "other content" in by_name["00007.tar"]["damage"][0]
    assert "whole samples in it, which `repair` saves: 1" in by_name["00004.tar"]["damage"]
    shown = capsys.readouterr().out
    assert "8 shards damaged, 30 samples lost" in shown
    assert "\x1b[31m" not in shown  # a name in the tar


@pytest.mark.chaos
def test_what_can_be_read_is_written_to_new_shards(sound, tmp_path, capsys):
    data = {number: (sound / f"{number:05d}.tar").read_bytes() for number in range(4)}
    zeros = data[1].index(b"0004.jpg")
    (sound / "00000.tar").write_bytes(data[0][:-12_000])
    (sound / "00001.tar").write_bytes(data[1][:zeros] + bytes(1024) + data[1][zeros + 1024 :])
    (sound / "00002.tar").write_bytes(data[2] + data[3])
    apart = [("3.jpg", IMAGE), ("4.jpg", IMAGE), ("3.txt", b"a"), ("4.txt", b"b"), ("5.jpg", IMAGE), ("6.txt", b"c")]
    write_tar(sound / "apart.tar", apart)
    assert main(["repair", str(sound), str(tmp_path / "new"), "--workers", "1"]) == 0
    assert "00001.tar: 7 of 8 samples can be read: " in capsys.readouterr().out
    counts = {shard.name: shard.samples for shard in read_index(tmp_path / "new")}
    assert 4 <= counts.pop("00000.tar") < 8
    assert counts == {"00001.tar": 7, "00002.tar": 16, "apart.tar": 2}
    assert verify(tmp_path / "new", tmp_path)[0] == 0


# ---------------------------------------------------------------------------------------------------------------- make


@pytest.fixture
def pictures_with_captions(tmp_path):
    """Twenty pictures and a CSV, with one that is no image and one of too many pixels."""
    for i in range(20):
        save(tmp_path / "mine" / f"{i}.png", shade(i))
    save(tmp_path / "mine" / "html.jpg", b"<html>404</html>")
    save(tmp_path / "mine" / "bomb.png", picture((0, 0, 0), (1, 200)))
    rows = [f"{name},caption of {name}" for name in ["html.jpg", "bomb.png", *(f"{i}.png" for i in range(20))]]
    return save(tmp_path / "mine" / "captions.csv", "\n".join(["image,caption", *rows]))


def make_words(table, out, *more):
    return ["make", str(table), "--out", str(out), "--samples", "8", "--workers", "1", *more]


def test_own_pictures_become_shards_or_nothing(pictures_with_captions, tmp_path, capsys):
    out = tmp_path / "made" / "mine"
    with pytest.raises(UserError, match=r"2 of 22 images .* cannot be used \(html.jpg: .*; bomb.png: .* 1 x 200"):
        main(make_words(pictures_with_captions, out))
    assert not any(out.parent.iterdir())
    assert main(make_words(pictures_with_captions, out, "--max-bad", "0.1")) == 0
    assert "2 images left out: html.jpg (" in capsys.readouterr().out
    assert [shard.samples for shard in read_index(out)] == [8, 8, 4]
    table, made = find_captions(pictures_with_captions), find_captions(out)
    assert made.captions == table.captions[2:]
    assert [which(made.images.open(i)) for i in range(20)] == list(range(20))
    assert verify(out, tmp_path)[0] == 0
    with pytest.raises(UserError, match="mine exists"):
        main(make_words(pictures_with_captions, out))
    assert main(make_words(pictures_with_captions, tmp_path / "again", "--max-bad", "0.1")) == 0
    for file in out.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_splits_become_folders(tmp_path):
    rows = [f"{i}.png,text {i},{('train', 'val')[i % 2]}" for i in range(6)]
    for i in range(6):
        save(tmp_path / f"{i}.png", shade(i))
    table = save(tmp_path / "x.csv", "\n".join(["image,text,split", *rows]))
    with pytest.raises(UserError, match="Name one of these splits"):
        main(make_words(table, tmp_path / "mine"))
    assert main(make_words(table, tmp_path / "mine", "--split", "train", "val")) == 0
    assert find_captions(tmp_path / "mine", "val").flat() == ["text 1", "text 3", "text 5"]
