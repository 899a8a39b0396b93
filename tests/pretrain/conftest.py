"""A small run for tests that disturb it."""

import pytest

from tests.forked import OPTIONS, pretraining


@pytest.fixture(autouse=True, scope="session")
def _imported_once():
    """Import once what every forked rank would import."""
    pretraining()


@pytest.fixture
def options(scenes, tmp_path):
    return {**OPTIONS, "data.train": scenes / "train", "samples": 16 * 10**4, "save-every": 0, "out": tmp_path / "run"}
