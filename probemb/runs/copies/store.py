"""The copy of a run in an object store or another folder: its checkpoints, and small files beside them.

    ADDRESS/checkpoints/step-N/…    as in the run folder; state.json is written last
    ADDRESS/config.yaml, metrics.jsonl, best.json

Every operation is a process of its own: a server that hangs can be ended, and what fsspec's packages do to a process
(event loops, threads) stays out of training.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from probemb.data.remote.child_process import run_program
from probemb.data.remote.sources import Remote, is_remote
from probemb.data.remote.transfer import TransferFailed
from probemb.errors import UserError, nearest

SILENCE = 120.0  # seconds after which an operation without a sign of life is ended
SMALL = ("config.yaml", "metrics.jsonl", "best.json")
EXTRAS = {"s3": "s3", "s3a": "s3"}  # by scheme: extras of this project
_WORKER = Path(__file__).with_name("worker.py")
_LONGEST = 64 << 20  # bytes of a result


class CopyFailed(Exception):
    """An operation on a copy failed; the text is the reason."""


class Store:
    """The copy at an address that fsspec knows, or in a folder."""

    def __init__(self, address: str, silence: float = SILENCE):
        self.address, self.silence = address, silence

    def __str__(self) -> str:
        """Without secrets."""
        return str(Remote(self.address)) if is_remote(self.address) else self.address

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first. Raises CopyFailed."""
        found = self._do("list") or {}
        return sorted((int(name[5:]) for name in found if re.fullmatch(r"step-\d+", name)), reverse=True)

    def try_writing(self) -> None:
        """Raises CopyFailed: nothing can be written or removed there."""
        self._do("try_writing")

    def put(self, folder: Path) -> None:
        """Copy a checkpoint; one of the same step is replaced. Raises CopyFailed."""
        self._do("put_checkpoint", str(folder))

    def put_small(self, run: Path) -> None:
        """Copy the run's small files. Raises CopyFailed."""
        self._do("put_files", *(str(run / name) for name in SMALL))

    def get(self, step: int, target: Path, names: tuple[str, ...]) -> None:
        """Fetch files of a checkpoint. Raises CopyFailed."""
        self._do("get", str(target), *(f"checkpoints/step-{step}/{name}" for name in names))

    def get_small(self, target: Path) -> None:
        """Fetch the run's small files. Raises CopyFailed."""
        self._do("get", str(target), *SMALL)

    def remove(self, steps: list[int]) -> None:
        """Remove checkpoints. Raises CopyFailed."""
        if steps:
            self._do("remove", *(f"step-{step}" for step in steps))

    def _do(self, command: str, *words: str):
        said = bytearray()

        def take(read: Callable[[], bytes]) -> None:
            while data := read():
                said.extend(data.replace(b"\0", b""))
                if len(said) > _LONGEST:
                    raise TransferFailed("the listing is too long")

        try:
            source = _WORKER.read_text(encoding="utf-8")
            run_program([sys.executable, "-c", source, command, self.address, *words], take, self.silence)
            return json.loads(said)
        except TransferFailed as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no sign of life in {self.silence:g} s"
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise CopyFailed(Remote(self.address).hide(reason) if is_remote(self.address) else reason)


def check_address(address: str, out: str | Path) -> None:
    """Refuse what a copy cannot be written to; imports the package of its scheme.

    Raises:
        UserError: the run folder itself, a scheme that nothing writes to, or a package that is not installed.
    """
    if not is_remote(address):
        here, there = Path(out).resolve(), Path(address).resolve()
        if here == there or here in there.parents or there in here.parents:
            raise UserError(f"The remote copy {address} is in the run folder {out}, or around it.", "Name another.")
        return
    remote = Remote(address)
    if remote.scheme in ("http", "https", "pipe", "memory"):
        raise UserError(
            f"A remote copy cannot be written to {remote}.", "Name s3://BUCKET/FOLDER, gs://…, or a folder."
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(remote.scheme)
    except ImportError as error:
        extra = EXTRAS.get(remote.scheme)
        remedy = f"Run `pip install 'probemb[{extra}]'`" if extra else "Install it with pip"
        raise UserError(
            f"{remote} needs a package that is not installed: {str(error).rstrip('.')}.",
            f"{remedy} in the environment of this project, or leave --remote-copy out.",
        ) from None
    except ValueError:
        raise UserError(
            f"'{remote.scheme}:' is not a known place for a remote copy."
            f"{nearest(remote.scheme, fsspec.available_protocols())}",
            "Name s3://BUCKET/FOLDER, gs://…, or a folder.",
        ) from None
