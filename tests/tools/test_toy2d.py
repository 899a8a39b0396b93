"""The toy of PCME++ §A.2: under CSD confusable points get the larger variance, under 2-Wasserstein they do not."""

from PIL import Image

from tools import toy2d


def test_only_csd_puts_variance_where_the_confusion_is():
    certain, confusable = toy2d.train("csd", epochs=40).variances
    assert confusable > 1.1 * certain
    certain, confusable = toy2d.train("wasserstein2", epochs=40).variances
    assert confusable < certain


def test_the_command_draws_what_it_found(tmp_path, capsys):
    out = tmp_path / "toy.png"
    assert toy2d.main(["--distance", "csd", "--seeds", "1", "--epochs", "2", "--out", str(out)]) == 0
    assert "1.68 / 3.05" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (600, 600)
