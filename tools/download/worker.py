"""Entry point of processes that fetch shards; it imports img2dataset but not torch, once for all of them.

img2dataset and the shards' writer import webdataset, which imports torch if it can: more than half of the start-up
time, and hundreds of MB. Both work without it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.modules.setdefault("torch", None)  # "import torch" now raises ImportError

from tools.download.fetch import Fetcher  # noqa: E402


def work(folder: Path, connection, options, settings: dict) -> None:
    """Fetch the shards received through a connection, until None is received or a shard cannot be stored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command kills this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _follow_parent()
    fetcher = Fetcher(folder, options, settings)
    done = True
    while done:
        connection.send("ready")
        task = connection.recv()
        if task is None:
            return
        done, _ = fetcher(task)


def _follow_parent() -> None:
    """End this process when the one that started it has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
