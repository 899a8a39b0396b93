"""The command that writes index.json: counts, damaged tars, and that nothing half-written is left."""

import io
import json
import subprocess
import sys
import tarfile

import pytest
from PIL import Image

from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.shards import iterate_samples
from tools.index_shards import main


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def corpus(tmp_path):
    """Three shards of 1, 2 and 3 samples; the last one also has groups that are none."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "JPEG")
    image = file.getvalue()
    for number in range(3):
        members = [(f"{i}.{ext}", data) for i in range(number + 1) for ext, data in (("jpg", image), ("txt", b"a"))]
        if number == 2:
            members += [("alone.jpg", image), ("words.txt", b"a"), ("README", b"x")]
        write_tar(tmp_path / f"{number:05d}.tar", members)
    return tmp_path


def test_index_and_table(corpus, capsys):
    assert main([str(corpus), "--workers", "2"]) == 0
    assert [(shard.name, shard.samples) for shard in read_index(corpus)] == [
        ("00000.tar", 1),
        ("00001.tar", 2),
        ("00002.tar", 3),
    ]
    assert set(json.loads((corpus / "index.json").read_text())["shards"][0]) == {"name", "samples", "bytes", "sha256"}
    table = capsys.readouterr().out
    row = next(line for line in table.splitlines() if "│" in line)
    total = sum(path.stat().st_size for path in corpus.glob("*.tar"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["3", "6", f"{total:,}", "2", "0"]
    assert sorted(path.name for path in corpus.iterdir()) == ["00000.tar", "00001.tar", "00002.tar", "index.json"]


def test_the_index_is_brought_up_to_date(corpus):
    main([str(corpus)])
    (corpus / "00001.tar").unlink()
    with pytest.raises(UserError):
        read_index(corpus)
    main([str(corpus)])
    assert sum(shard.samples for shard in read_index(corpus)) == 4


def test_damaged_tars_stop_it_before_anything_is_written(corpus, capsys):
    whole = (corpus / "00001.tar").read_bytes()
    (corpus / "00001.tar").write_bytes(whole[:1500])
    (corpus / "00003.tar").write_bytes(b"<html>503</html>" * 100)
    (corpus / "index.json").write_text("old")
    with pytest.raises(UserError, match="2 of 4 shards") as refused:
        main([str(corpus)])
    assert "--skip-damaged" in refused.value.remedy
    named = capsys.readouterr().err
    assert "00001.tar: cut off" in named
    assert "00003.tar: not a tar" in named
    assert (corpus / "index.json").read_text() == "old"

    assert main([str(corpus), "--skip-damaged"]) == 0
    assert [shard.name for shard in read_index(corpus)] == ["00000.tar", "00002.tar"]


def test_nothing_to_index(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        main([str(tmp_path / "none")])
    with pytest.raises(UserError, match=r"no \.tar files"):
        main([str(tmp_path)])
    write_tar(tmp_path / "a.tar", [("README", b"x")])
    with pytest.raises(UserError, match="holds a sample"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match=r"--workers is 0\. Set it to a whole number from 1"):
        main([str(tmp_path), "--workers", "0"])
    assert not (tmp_path / "index.json").exists()


def test_an_index_that_cannot_be_written(corpus):
    (corpus / "index.json").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        main([str(corpus)])
    assert not list(corpus.glob(".index*"))


def test_the_command_ends_with_code_2_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "tools.index_shards", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 2


def test_real_photographs(shared_data, tmp_path):
    for path in sorted(shared_data("flickr8k").glob("train-*.tar")):
        (tmp_path / path.name).symlink_to(path)
    main([str(tmp_path)])
    shards = read_index(f"{tmp_path}/train-{{00000..00005}}.tar")
    assert [shard.samples for shard in shards] == [1_000] * 6
    assert sum(1 for _ in iterate_samples(shards[:1])) == 1_000
