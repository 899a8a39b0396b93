"""What a process that fetches shards imports, once for all of them: img2dataset, but not torch.

img2dataset imports webdataset for a writer that is not used here, and webdataset imports torch where there is one:
more than half of the seconds of a start, and hundreds of MB. It goes without where there is none.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.modules.setdefault("torch", None)  # "import torch" is now an ImportError

from tools.download.fetch import make_fetcher  # noqa: E402


def work(folder: Path, line, given, settings: dict) -> None:
    """Fetch the shards that come through `line`, a connection, until None comes or a shard cannot be stored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _follow_parent()
    fetcher = make_fetcher(folder, given, settings)
    done = True
    while done:
        line.send("ready")
        task = line.recv()
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
