"""Files of regions in SCAN's form, small enough to train on in a test."""

from pathlib import Path

import numpy as np

WORDS = ("red", "green", "blue", "round", "flat", "small")


def write_regions(folder: Path, train: int = 16, val: int = 8) -> Path:
    """Images of three regions (of six, 437 numbers), each a word; a caption says one to three of the words."""
    random = np.random.RandomState(0)
    looks = random.randn(len(WORDS), 437).astype(np.float32)
    for name, n in (("train", train), ("dev", val)):
        shown = np.stack([random.permutation(len(WORDS))[:3] for _ in range(n)])
        array = np.zeros((n, 6, 437), np.float32)
        array[:, :3] = looks[shown] + 0.1 * random.randn(n, 3, 437)
        np.save(folder / f"{name}_ims.npy", array)
        captions = [" ".join(WORDS[w] for w in row[: 1 + k % 3]) for row in shown for k in range(5)]
        (folder / f"{name}_caps.txt").write_text("\n".join(captions) + "\n")
    (folder / "vocabulary.txt").write_text("".join(f"{word}\t9\n" for word in WORDS))
    return folder
