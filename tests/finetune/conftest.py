"""Fixtures of this folder."""

from tests.world import captioned, names, pictures, run_folder, shards

__all__ = ["captioned", "names", "pictures", "run_folder", "shards"]
