"""Processes that share the work of a command, and commands one of whose processes is killed."""

import signal

import pytest

from probemb.errors import UserError
from tools.pools import process_pool


def test_a_killed_process_is_told_with_the_option_to_change():
    with pytest.raises(UserError, match="process was killed") as refused, process_pool(2, 4, "--hands") as pool:
        list(pool.map(signal.raise_signal, [signal.SIGKILL] * 4))
    assert refused.value.remedy == "Start the command again with fewer --hands."
