"""Fixtures that every folder of tests shares: a small world and model, reference vectors and real data."""

import ctypes
import gc
import os
import signal
from pathlib import Path

# Before anything loads OpenMP: what is forked from a process that has computed with several threads would hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from tests.world import boxed_scenes, captioned, composed_scenes, names, pictures, run_folder, scenes, shards

__all__ = ["boxed_scenes", "captioned", "composed_scenes", "names", "pictures", "run_folder", "scenes", "shards"]

SHARED = Path(__file__).resolve().parents[2] / "shared"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else every command under test would ignore Ctrl-C too


CORE = ("losses", "metrics", "models", "evaluation", "test_compose.py", "test_distances.py", "test_distributed.py")
CORE += ("test_gaussian.py",)
SLOW = ("pretrain/test_full_disk.py", "pretrain/test_watchdog.py")
FLOW = ["tests/slurm/test_preemption.py", "test_preempted_requeued_finished_and_equal_to_an_undisturbed_run"]


def pytest_collection_modifyitems(items):
    """`-m slow`: also large groups of ranks, ZeRO 0 and 2, and Slurm but for one preempted job."""
    tests = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests)
        case = item.callspec.params if hasattr(item, "callspec") else {}
        many_ranks = max(case.get("world", 0), case.get("ranks", 0)) > 2 + ("stage" not in case)
        on_slurm = "cluster" in item.fixturenames and item.nodeid.split("::") != FLOW
        if many_ranks or case.get("stage") in (0, 2) or on_slurm or path.as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if path.parts[0] in CORE and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.core)


def pytest_collection_finish(session):
    """Take what is imported by now out of later collections of garbage, which forks would pay for too."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _give_memory_back():
    """After every file: freed memory that the allocator keeps makes each later fork slower, and there are many."""
    yield
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)


@pytest.fixture
def parity():
    """parity("01_pcmepp_csd_loss") -> dict of arrays computed by the authors' code; skips where the file is absent."""

    def load(item: str) -> dict[str, np.ndarray]:
        path = SHARED / "parity" / f"{item}.npz"
        if not path.is_file():
            pytest.skip(f"no reference vectors here: {item}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}

    return load


@pytest.fixture
def tensors(parity):
    """The same as tensors, but for texts."""
    return lambda item: {n: torch.from_numpy(np.asarray(a)) for n, a in parity(item).items() if a.dtype.kind in "biuf"}


@pytest.fixture(scope="session")
def shared_data():
    """shared_data("flickr8k") -> its folder; skips where the data set is absent."""

    def find(name: str) -> Path:
        path = SHARED / "data" / name
        if not path.is_dir():
            pytest.skip(f"no real data here: {name}")
        return path

    return find
