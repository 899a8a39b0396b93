"""The toy of PCME++ §A.2: under CSD confusable points get the larger variance, under 2-Wasserstein they do not."""

import pytest

from probemb.errors import UserError
from tools import toy2d


def test_only_csd_puts_variance_where_the_confusion_is():
    certain, confusable = toy2d.train("csd", epochs=40).variances
    assert confusable > 1.1 * certain
    certain, confusable = toy2d.train("wasserstein2", epochs=40).variances
    assert confusable < certain


@pytest.mark.parametrize("name", toy2d.TRIPLETS)
def test_triplets_move_the_means_alone(name):
    start, toy = toy2d.train(name, epochs=0), toy2d.train(name, epochs=30)
    assert toy.variance.equal(start.variance)
    assert toy.places[0] > 0.95 > start.places[0]


def test_the_command_draws_what_it_found(tmp_path, capsys):
    out = tmp_path / "toy.html"
    assert toy2d.main(["--distance", "csd", "--seeds", "1", "--epochs", "2", "--out", str(out)]) == 0
    assert "1.68 / 3.05" in capsys.readouterr().out
    page = out.read_text()
    assert page.count("<circle") == toy2d.CLASSES * toy2d.POINTS
    assert {file.name for file in (tmp_path / "toy-figures").iterdir()} == {"toy2d-csd.pdf", "toy2d-csd.png"}
    assert toy2d.main(["--distance", "triplet-hardest", "--seeds", "1", "--epochs", "1", "--out", str(out)]) == 0
    assert "Mean variance" not in out.read_text()
    out.write_text("somebody else's")
    with pytest.raises(UserError, match="was not written by this command"):
        toy2d.main(["--out", str(out)])
    with pytest.raises(UserError, match="no distance 'cds'"):
        toy2d.main(["--distance", "cds", "--out", str(tmp_path / "x.html")])
    with pytest.raises(UserError, match="--epochs is 0"):
        toy2d.main(["--epochs", "0"])
