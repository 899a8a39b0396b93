"""The ranking `tolerance` in the retrieval command."""

import io
import json
import re
import tarfile

import pytest
from PIL import Image

from probemb.data.scenes import scene
from probemb.errors import UserError
from tests.world import jpeg, write_tar
from zeroshot.retrieval import main


def command(run_folder, data, out, *options):
    return main(["--model", str(run_folder), "--data", str(data), "--no-split", "--out", str(out), *options])


def test_weights_that_are_given(run_folder, captioned, tmp_path, capsys):
    """1 is CSD, 0 the means; a given weight is no oracle."""
    names = ("--rankings", "tolerance,csd,mean,log-likelihood,inclusion", "--erased", "0")
    for weights, same in (((1, 1), "csd"), ((0, 0), "mean"), ((-1, 0), None)):
        options = [f"--tolerance.{way}={weight}" for way, weight in zip(("i2t", "t2i"), weights)]
        assert command(run_folder, captioned, tmp_path, *names, *options) == 0
        results = json.loads((tmp_path / "results.json").read_text())
        rows = {row["ranking"]: row for row in results["rows"] if row["positives"] == "own captions"}
        assert set(rows) == set(names[1].split(","))
        if same:
            assert rows["tolerance"]["rsum"] == pytest.approx(rows[same]["rsum"], abs=5)  # near ties
        assert rows["tolerance"]["chosen"] == "given"
        found = results["tolerance"]["given"]
        assert (found["i2t"], found["t2i"], found["curve"]) == (*weights, None)
    assert "captions' u times -1 and the images' u times 0" in rows["tolerance"]["how"]
    assert "oracle" not in capsys.readouterr().out.replace("(at random", "")
    assert "Variance as a tolerance" not in (tmp_path / "report.html").read_text()


def test_weights_chosen_on_other_images_are_called_so(run_folder, captioned, tmp_path, capsys):
    members = []
    for i in range(12):
        members += [(f"{i}.jpg", jpeg(scene("other", i))), (f"{i}.txt", f"one {i}\ntwo {i}".encode())]
    other = write_tar(tmp_path / "other" / "val" / "a.tar", members).parent.parent
    options = ("--rankings", "csd,tolerance", "--erased", "0", "--select-data", str(other))
    for metric, key in (("auto", "recall"), ("map-at-r", "map_at_r")):
        assert command(run_folder, captioned, tmp_path / "out", *options, "--select-metric", metric) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        found = results["tolerance"]["chosen"]
        assert (found["chosen"], found["metric"], found["positives"]) == ("chosen on val", key, "own captions")
        assert "tolerance, chosen on val" in re.sub(r"\s+", " ", (tmp_path / "out" / "report.html").read_text())
    assert "an <b>oracle</b>" not in (tmp_path / "out" / "report.html").read_text()
    assert "tolerance, chosen on val: u of captions times" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"24 of the images in .* are also evaluated"):
        command(run_folder, captioned, tmp_path / "out", "--select-data", str(captioned), "--no-select-split")
    with tarfile.open(captioned) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    for name in files:
        if name.endswith(".jpg"):
            data = io.BytesIO()
            Image.open(io.BytesIO(files[name])).save(data, "WEBP", quality=90)
            files[name] = data.getvalue()
    again = write_tar(tmp_path / "again" / "val" / "a.tar", list(files.items())).parent.parent
    with pytest.raises(UserError, match=r"24 of the 24 images in .* show the same pictures as evaluated"):
        command(run_folder, captioned, tmp_path / "out", "--select-data", str(again))
    with pytest.raises(UserError, match="no split 'train'"):
        command(run_folder, captioned, tmp_path / "out", "--select-data", str(other), "--select-split", "train")
    with pytest.raises(UserError, match="map-at-r-true needs data whose true captions are all known"):
        command(run_folder, captioned, tmp_path / "out", *options, "--select-metric", "map-at-r-true")
