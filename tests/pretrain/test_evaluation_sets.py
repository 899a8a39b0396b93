"""Several validation sets while training, as the command is typed."""

import pytest

from pretrain.config import Config, Data, Evaluate
from pretrain.contradictions import check
from pretrain.evaluation_sets import RETRIEVAL, metrics
from probemb import UserError
from tests.pretrain.test_run import metrics as logged
from tests.pretrain.test_run import start


def test_each_set_is_logged_under_its_name(scenes, tmp_path):
    """The same data under two names has the same values, and another split others."""
    sets = {
        "evaluate.pairs": f'["{scenes}/val", "again={scenes}/val", "all={scenes}/train"]',
        "evaluate.pairs_split": '["val", "val", null]',
        "evaluate.classes": f"named={scenes}/classes",
    }
    done = start({**sets, "data.train": scenes / "train", "out": tmp_path / "run", "samples": 32})
    assert done.returncode == 0, done.stderr
    lines = [line for line in logged(tmp_path / "run") if "loss" not in line]
    found = {key: value for line in lines for key, value in line.items() if "/" in key}
    config = Evaluate(pairs=[f"{scenes}/val", "again=x", "all=x"], classes="named=x", pairs_split=["val", "val", None])
    assert list(found) == metrics(config)
    for key in RETRIEVAL:
        assert found[f"val/{key}"] == found[f"again/{key}"]
    assert found["all/validation_loss"] != found["val/validation_loss"]
    for words in ("val: validation loss", "again: validation loss", "named: zero-shot top-1"):
        assert f"step 2/2 | {words}" in done.stdout


BEST = {
    "nothing evaluated": ({"best": "rsum"}, "nothing is evaluated"),
    "unknown": ({"best": "rsun", "pairs": "a"}, "rsun, which no evaluation logs. Did you mean 'rsum'"),
    "at the end only": ({"best": "x/rsum", "pairs": "x=a"}, "evaluated at its end only"),
}


@pytest.mark.parametrize("case", BEST)
def test_a_best_that_cannot_be_chosen_is_refused(case):
    given, what = BEST[case]
    with pytest.raises(UserError) as error:
        check(Config(data=Data(train="data"), evaluate=Evaluate(**given)), 1)
    assert what in str(error.value)
