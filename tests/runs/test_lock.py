"""A folder that an earlier start of the same job still writes, on a machine that Slurm has lost."""

import threading

import pytest

from probemb.errors import UserError
from probemb.runs import lock
from probemb.runs.lock import RunLock, refuse_locked

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)


def test_a_requeued_job_waits_until_its_earlier_start_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    held, told = RunLock(tmp_path), []
    end = threading.Timer(1.0, held.release)
    end.start()
    refuse_locked(tmp_path, minutes=1, tell=told.append)
    end.join()
    assert len(told) == 1
    assert "is in use: process" in told[0]
    assert "waiting up to 1 minutes (engine.timeout)" in told[0]


@pytest.mark.parametrize("restarts", [None, "0"])
def test_a_first_start_is_refused_at_once(tmp_path, monkeypatch, restarts):
    """Another job writes the folder, and may do so for days."""
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    held, told = RunLock(tmp_path), []
    with pytest.raises(UserError, match="is in use"):
        refuse_locked(tmp_path, minutes=1, tell=told.append)
    assert not told
    held.release()
