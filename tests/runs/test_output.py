"""The files of a run, as a start that fails leaves them."""

import pytest

from pretrain.config import Config
from probemb.errors import UserError
from probemb.runs.folder import newest_checkpoint
from probemb.runs.output import RunOutput


def test_a_failed_login_at_wandb_leaves_no_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    config = Config(out=str(tmp_path / "run"), wandb="project")
    with pytest.raises(UserError, match="wandb login"):
        RunOutput(config, 0, 10)
    assert newest_checkpoint(config.out, False, Config) is None
