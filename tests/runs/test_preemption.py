"""Signals that ask a run to stop."""

import os
import signal

import pytest

from probemb.runs.preemption import Preemption


@pytest.mark.parametrize(
    ("number", "says", "code"),
    [
        (signal.SIGTERM, "SIGTERM", 85),
        (signal.SIGUSR1, "SIGUSR1", 85),
        (signal.SIGHUP, "SIGHUP", 85),
        (signal.SIGINT, "Ctrl-C", 130),
    ],
)
def test_is_remembered(number, says, code):
    before = signal.getsignal(number)
    with Preemption() as preemption:
        assert not preemption.asked()
        os.kill(os.getpid(), number)
        assert (preemption.asked(), preemption.description, preemption.exit_code) == (True, says, code)
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_handed_on(monkeypatch, capfd):
    with Preemption():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.count("Ctrl-C again ends at once") == 1
        monkeypatch.setattr("probemb.runs.preemption.SAME_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_nohup_keeps_its_sighup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.asked()
    finally:
        signal.signal(signal.SIGHUP, before)
