"""Log of the samples that a rank has trained on, for log_samples."""

from __future__ import annotations

import json
from pathlib import Path

from probemb.runs.log import drop_lines_after
from probemb.runs.log_file import LogFile, Warnings


class SampleLog:
    """The keys of the samples that a rank has trained on, one line per step: samples/rank-R.jsonl.

    Args:
        run: the run folder.
        step: as for `RunLog`; rank 0 also cuts the files of ranks that no longer exist.
    """

    def __init__(self, run: Path, step: int, rank: int, world_size: int):
        folder = run / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".rank-{rank}.jsonl.*"):  # of a killed attempt
            left.unlink(missing_ok=True)
        for path in folder.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdigit() and (int(number) == rank or (rank == 0 and int(number) >= world_size)):
                drop_lines_after(path, step)
        self.file = LogFile(folder / f"rank-{rank}.jsonl", Warnings())

    def write(self, step: int, keys: list[str]) -> None:
        """Log the samples of one step."""
        self.file.write(f"{json.dumps({'step': step, 'keys': keys})}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self.file.close()
