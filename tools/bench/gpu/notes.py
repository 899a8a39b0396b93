"""The settings of a check, and the notes that it takes while it runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probemb.files import replace_text

if TYPE_CHECKING:
    import torch


class Skip(Exception):
    """The whole check cannot run here; the message says why."""


@dataclass(frozen=True)
class Place:
    """Circumstances in which a check runs.

    Attributes:
        small: the reduced form, with tiny towers.
        until: `time.monotonic()` at which its time is over.
    """

    small: bool
    until: float

    @property
    def device(self) -> torch.device:
        """The first GPU, or the CPU."""
        import torch

        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def gpu(self) -> bool:
        """True if there is a GPU."""
        return self.device.type == "cuda"

    def seconds_left(self) -> float:
        """Until the check is ended."""
        return self.until - time.monotonic()


@dataclass
class Notes:
    """Measured values, claims that held or not, and parts that were skipped, in a file from the first one on: what a
    check has noted is kept if it is ended.

    Attributes:
        path: the file; None writes nothing.
        values: numbers and texts by name.
        claims: [sentence, whether it held].
        skipped: reason by the name of the part; "" is the whole check.
    """

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    claims: list[tuple[str, bool]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, value: Any) -> None:
        """A measured value, plain JSON."""
        self.values[name] = value
        self._write()

    def claim(self, sentence: str, held: bool) -> None:
        """A sentence that must be true; the check goes on if it is not."""
        self.claims.append((sentence, bool(held)))
        self._write()

    def skip(self, part: str, reason: str) -> None:
        """A part that cannot run here."""
        self.skipped[part] = reason
        self._write()

    def _write(self) -> None:
        if self.path:
            content = asdict(self)
            del content["path"]
            replace_text(self.path, json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> Notes:
        """Output of a check; empty if it wrote nothing."""
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()
