"""--verify finds beforehand what training would stumble over, and the same of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from probemb.data.scenes import class_scene
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.pretrain.stream.test_stream import make, write_corpus, write_shard
from tests.world import jpeg, write_tar
from tools.index_shards import main

KINDS = {
    (0, 1): "image",
    (0, 4): "caption",
    (1, 2): "encoding",
    (1, 3): "zero bytes",
    (2, 0): "bomb",
    (3, 5): "name",
}


@pytest.fixture
def sound(tmp_path):
    write_corpus(tmp_path / "data", sizes=(8,) * 8)
    main([str(tmp_path / "data"), "--workers", "1"])
    return tmp_path / "data"


def verify(folder, tmp_path, *words) -> tuple[int, dict]:
    code = main(["--verify", str(folder), "--workers", "2", "--report", str(tmp_path / "report.json"), *words])
    return code, json.loads((tmp_path / "report.json").read_text())


def damage(folder) -> None:
    """Every kind, in shards that the index describes as sound."""
    bad = [{i: kind for (s, i), kind in KINDS.items() if s == shard} for shard in range(4)]
    for shard in range(4):
        write_shard(folder / f"{shard:05d}.tar", 8, bad[shard])
    (folder / "00004.tar").write_bytes((folder / "00004.tar").read_bytes()[:5000])
    (folder / "00005.tar").write_bytes(b"")
    write_shard(folder / "00006.tar", 5)


def test_sound_shards(sound, tmp_path, capsys):
    code, report = verify(sound, tmp_path)
    assert code == 0
    assert report == {"folder": str(sound), "shards": 8, "samples": 64, "lost": 0, "damaged": []}
    assert "8 shards, 64 samples: 0 shards damaged, 0 samples lost" in capsys.readouterr().out


@pytest.mark.chaos
def test_it_finds_what_training_finds(sound, tmp_path, capsys):
    shards = read_index(sound)
    damage(sound)
    index = (sound / "index.json").read_text()
    code, report = verify(sound, tmp_path)
    assert code == 1
    assert (sound / "index.json").read_text() == index
    with make(shards, steps=8, failure_share=1) as stream:  # one epoch, nothing is dropped
        list(stream)
    found = {row["name"]: row["lost"] for row in report["damaged"]}
    assert found == {name: failure.count for name, failure in stream.failures.items()}
    assert report["lost"] == sum(found.values()) == 6 + 8 + 8 + 8
    by_name = {row["name"]: row for row in report["damaged"]}
    assert {(int(name[:5]), bad["index"]) for name, row in by_name.items() for bad in row["bad_samples"]} == set(KINDS)
    for name, failure in stream.failures.items():
        reasons = [bad["reason"] for bad in by_name[name]["bad_samples"]] + by_name[name]["damage"]
        if int(name[:5]) != 6:  # said in other words
            assert any(reason in failure.reason for reason in reasons), (failure.reason, reasons)
    assert "holds 5 samples, but its index says 8" in by_name["00006.tar"]["damage"]
    shown = capsys.readouterr().out
    assert "7 shards damaged, 30 samples lost" in shown
    assert "cut off" in shown
    assert "\x1b[31m" not in shown


def test_shards_that_are_missing_or_new(sound, tmp_path):
    (sound / "00002.tar").unlink()
    write_shard(sound / "new.tar", 3)
    code, report = verify(sound, tmp_path)
    assert code == 1
    assert [(row["name"], row["damage"], row["lost"]) for row in report["damaged"]] == [
        ("00002.tar", ["is not there"], 8)
    ]


def test_the_index_is_written_only_when_asked(sound, tmp_path):
    damage(sound)
    code, _ = verify(sound, tmp_path, "--write-index")
    assert code == 1
    assert {shard.name: shard.samples for shard in read_index(sound)} == {
        **{f"{i:05d}.tar": 8 for i in (0, 1, 2, 3, 7)},
        "00006.tar": 5,
    }
    (sound / "index.json").unlink()
    verify(sound, tmp_path)
    assert not (sound / "index.json").exists()


def test_options_that_do_not_belong_together(sound, tmp_path):
    with pytest.raises(UserError, match="--report belongs to --verify"):
        main([str(sound), "--report", "x.json"])
    with pytest.raises(UserError, match="cannot be written"):
        main(["--verify", str(sound), "--report", str(sound)])


def test_labelled_images_need_no_caption(tmp_path, capsys):
    image = jpeg(class_scene("test", 0))
    write_tar(
        tmp_path / "a.tar", [(f"{i}.{ext}", data) for i in range(3) for ext, data in (("jpg", image), ("cls", b"1"))]
    )
    assert main(["--verify", str(tmp_path), "--labelled", "--workers", "1"]) == 0
    assert main(["--verify", str(tmp_path), "--workers", "1"]) == 1
    assert "3 samples lost" in capsys.readouterr().out


def test_real_photographs(shared_data):
    assert main(["--verify", str(shared_data("flickr8k")), "--workers", "2"]) == 0


@pytest.mark.chaos
def test_another_content_of_the_same_size_is_damage(sound, tmp_path, capsys):
    path = sound / "00001.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"caption")] ^= 1  # a letter of a caption, which no decoder would miss
    path.write_bytes(data)
    code, report = verify(sound, tmp_path)
    assert code == 1
    assert [(row["name"], row["lost"]) for row in report["damaged"]] == [("00001.tar", 0)]
    assert "other content" in report["damaged"][0]["damage"][0]
    old = json.loads((sound / "index.json").read_text())
    for row in old["shards"]:
        del row["sha256"]
    (sound / "index.json").write_text(json.dumps(old))
    code, _ = verify(sound, tmp_path)
    assert code == 0
    assert "8 of 8 shards have no SHA-256 in index.json" in capsys.readouterr().out


@pytest.mark.chaos
def test_what_can_be_read_is_written_to_new_shards(sound, tmp_path, capsys):
    data = {number: (sound / f"{number:05d}.tar").read_bytes() for number in range(4)}
    cut, zeros = len(data[0]) - 12_000, data[1].index(b"0004.jpg")
    (sound / "00000.tar").write_bytes(data[0][:cut])
    (sound / "00001.tar").write_bytes(data[1][:zeros] + bytes(1024) + data[1][zeros + 1024 :])
    (sound / "00002.tar").write_bytes(data[2] + data[3])
    code, _ = verify(sound, tmp_path, "--repair", str(tmp_path / "new"))
    assert code == 1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["00000.tar", "00001.tar", "00002.tar"]
    shown = capsys.readouterr().out
    assert main([str(tmp_path / "new"), "--workers", "1"]) == 0
    counts = {shard.name: shard.samples for shard in read_index(tmp_path / "new")}
    assert 4 <= counts["00000.tar"] < 8
    assert counts["00001.tar"] == 7
    assert counts["00002.tar"] == 16
    assert all(f"{name}: {count} samples" in shown.replace("\n", "") for name, count in counts.items())
    assert verify(tmp_path / "new", tmp_path)[0] == 0
    with pytest.raises(UserError, match="is there already"):
        verify(sound, tmp_path, "--repair", str(tmp_path / "new"))
    with pytest.raises(UserError, match="damaged shards themselves"):
        verify(sound, tmp_path, "--repair", str(sound))


@pytest.mark.chaos
def test_samples_split_over_parts_are_damage(tmp_path, capsys):
    image, text = jpeg(class_scene("test", 0)), b"a caption"
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "a.tar", [("0.jpg", image), ("0.txt", text), ("1.jpg", image)])
    write_tar(tmp_path / "data" / "b.tar", [("1.txt", text), ("2.jpg", image), ("2.txt", text)])
    write_tar(
        tmp_path / "data" / "c.tar",
        [("3.jpg", image), ("4.jpg", image), ("3.txt", text), ("4.txt", text), ("5.jpg", image), ("6.txt", text)],
    )
    assert main(["--verify", str(tmp_path / "data"), "--workers", "1"]) == 1
    code, report = verify(tmp_path / "data", tmp_path, "--repair", str(tmp_path / "new"))
    assert code == 1
    assert {row["name"]: row["damage"] for row in report["damaged"]} == {
        "a.tar": ["1 sample is split over this shard and b.tar (1)"],
        "c.tar": ["2 samples are split over files that are not one after the other (3, 4)"],
    }
    assert main([str(tmp_path / "new"), "--workers", "1"]) == 0
    assert {shard.name: shard.samples for shard in read_index(tmp_path / "new")} == {"a.tar": 1, "c.tar": 2}


@pytest.mark.parametrize("part", ["verify", "repair", "measure"])
def test_a_part_says_whose_part_it_is(part):
    argv = [sys.executable, "-m", f"tools.{part}_shards", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 1
    assert "python -m tools.index_shards" in done.stderr
