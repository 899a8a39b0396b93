"""Entry point of processes that fetch shards; imports img2dataset, but not torch, once for all of them.

img2dataset and the shards' writer import webdataset, which imports torch if possible: hundreds of MB and more than half
of the start-up time. Both work without it.
"""

import os
import signal
import sys
from pathlib import Path

sys.modules.setdefault("torch", None)  # "import torch" now raises ImportError

from probemb.pools import follow_parent  # noqa: E402
from tools.download.fetch import Fetcher  # noqa: E402


def work(folder: Path, connection, options, settings: dict) -> None:
    """Fetch shards received through a connection, until it sends None or a shard cannot be stored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command kills this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow_parent(os.getppid())
    fetcher = Fetcher(folder, options, settings)
    done = True
    while done:
        connection.send("ready")
        task = connection.recv()
        if task is None:
            return
        done, _ = fetcher(task)
