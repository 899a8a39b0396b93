"""Signals that ask a run to stop."""

import os
import signal

import pytest

from probemb.runs.preemption import Preemption


@pytest.mark.parametrize(
    ("number", "says", "code"),
    [(signal.SIGTERM, "SIGTERM", 85), (signal.SIGUSR1, "SIGUSR1", 85), (signal.SIGINT, "Ctrl-C", 130)],
)
def test_is_remembered(number, says, code):
    before = signal.signal(number, signal.SIG_DFL)  # a test under nohup has it ignored
    try:
        with Preemption() as preemption:
            assert not preemption.asked()
            os.kill(os.getpid(), number)
            assert (preemption.asked(), preemption.description, preemption.exit_code) == (True, says, code)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_handed_on(monkeypatch, capfd):
    with Preemption():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.count("Ctrl-C again ends at once") == 1
        monkeypatch.setattr("probemb.runs.preemption.SAME_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # nohup; the background of a script
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), number)
            assert not preemption.asked()
    finally:
        signal.signal(number, before)


def test_ctrl_c_that_has_ended_the_reader_of_stderr_saves():
    read, write = os.pipe()
    os.close(read)  # as `| tee log` leaves it
    stderr = os.dup(2)
    os.dup2(write, 2)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGINT)
            assert preemption.asked()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write)
