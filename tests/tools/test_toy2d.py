"""The toy of PCME++ §A.2: under CSD confusable points get the larger variance, under 2-Wasserstein they do not."""

import pytest
from PIL import Image

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
    out = tmp_path / "toy.png"
    assert toy2d.main(["--distance", "csd", "--seeds", "1", "--epochs", "2", "--out", str(out)]) == 0
    assert "1.68 / 3.05" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (600, 600)
    with pytest.raises(UserError, match="no distance 'cds'"):
        toy2d.main(["--distance", "cds", "--out", str(out)])
