"""Options of `python -m tools.download`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type

from probemb.cli.machine import WAITING, cores, refuse_crowd
from probemb.cli.ranges import Processes, Requests
from probemb.errors import UserError

Resize = Literal["keep_ratio", "keep_ratio_largest", "center_crop", "border", "no"]
PROCESSES = min(16, cores())
Quality = restricted_number_type("Quality", int, [(">=", 1), ("<=", 100)])
TEMPORARY_CAUSES = "no answer,too slow,connection,cut off,host not found,HTTP 408,HTTP 425,HTTP 429,HTTP 5"
STORED_SETTINGS = ("image_size", "resize", "upscale", "min_size", "quality", "hash", "shard_size", "captions")


@dataclass(frozen=True)
class Download:
    """Options of the command.

    Args:
        out: the folder of the shards.
        image_size: pixels of the shorter side (keep_ratio, center_crop) or the longer one.
        resize: keep_ratio, keep_ratio_largest, center_crop, border (padded with white) or no; by default
            "keep_ratio" for lists and "no" (unchanged bytes) for archives.
        upscale: resize smaller images too.
        min_size: pixels of the shorter side below which an image is dropped.
        quality: of the JPEGs, 1 to 100.
        hash: of the bytes as fetched, by which duplicates are found: sha256, sha512 or md5.
        captions: clean (no markup, "person" for <PERSON>) or raw.
        shard_size: rows of a shard.
        patience: seconds without data after which an address is abandoned.
        seconds: for one address in total.
        max_mib: MiB of one response at most.
        redirects: followed for one address.
        user_agent: a token to add to the user agent, by which servers may address this project.
        respect_opt_out: leave out images whose server says noai, noimageai, noindex, noimageindex or none.
        private_hosts: also contact hosts in private networks, including this machine.
        distributor: multiprocessing, pyspark or ray.
        processes: concurrent processes, one shard each.
        threads: concurrent requests per process.
        part: fetch only part I/N of the shards, as a task of a job array; a command without it finishes the corpus.
        retry_failed: retry images that failed for a temporary cause.
        retry_causes: those causes, separated by commas.
        prepare: read the lists and fetch nothing.
        json: print the report as JSON.
    """

    out: str = ""
    image_size: PositiveInt = 256
    resize: Resize | None = None
    upscale: bool = False
    min_size: NonNegativeInt = 32
    quality: Quality = 95
    hash: Literal["sha256", "sha512", "md5"] = "sha256"
    captions: Literal["clean", "raw"] = "clean"
    shard_size: PositiveInt = 10_000
    patience: PositiveFloat = 10.0
    seconds: PositiveFloat = 60.0
    max_mib: PositiveFloat = 32.0
    redirects: NonNegativeInt = 5
    user_agent: str | None = None
    respect_opt_out: bool = True
    private_hosts: bool = False
    distributor: Literal["multiprocessing", "pyspark", "ray"] = "multiprocessing"
    processes: Processes = PROCESSES
    threads: Requests = 64
    part: str | None = None
    retry_failed: bool = False
    retry_causes: str = TEMPORARY_CAUSES
    prepare: bool = False
    json: bool = False


def restore_settings(options: Download, words: Sequence[str]) -> Download:
    """Use the folder's stored settings for options that were not typed. Raises UserError."""
    from tools.download.plan import read_state

    typed = {word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for word in words if word[:2] == "--"}
    state = read_state(Path(options.out))
    if state is None or "config" in typed:
        return options
    stored = {name: state.settings[name] for name in STORED_SETTINGS if name in state.settings and name not in typed}
    return replace(options, **stored)


def check(options: Download) -> tuple[int, int]:
    """Check options before anything is read; returns the part as (i, n). Raises UserError."""
    if not options.out:
        raise UserError("--out is missing.", "Name the folder for the shards, for example --out data/cc3m.")
    if options.distributor == "multiprocessing":
        refuse_crowd(options.threads, "--threads", options.processes, WAITING)
    if options.distributor != "multiprocessing" and not importlib.util.find_spec(options.distributor):
        raise UserError(
            f"--distributor {options.distributor} needs the package {options.distributor}.",
            f"Install it with pip install {options.distributor}, or leave the option out.",
        )
    if options.user_agent is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,60}", options.user_agent):
        raise UserError(f"--user-agent is '{options.user_agent[:80]}'.", "Give one word of letters, digits, . _ and -.")
    if options.part is None:
        return 1, 1
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part is {options.part}.", "Write it as 3/8: the third of eight parts.")
    if options.retry_failed:
        raise UserError("--part and --retry-failed exclude each other.", "Retry with one command for all parts.")
    return int(found[1]), int(found[2])
