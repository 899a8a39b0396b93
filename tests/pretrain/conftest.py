"""A small run for tests that disturb it."""

import pytest

from tests.forked import pretraining


@pytest.fixture(autouse=True, scope="session")
def _imported_once():
    """Import once what every forked rank would import."""
    pretraining()


@pytest.fixture
def options(scenes, tmp_path):
    return {
        "data.train": scenes / "train",
        "data.workers": 0,
        "model.name": "ViT-Micro-32",
        "batch-size": 16,
        "samples": 16 * 10**4,
        "optimizer.warmup_samples": 64,
        "log-every": 1,
        "save-every": 0,
        "engine.threads": 1,
        "out": tmp_path / "run",
    }
