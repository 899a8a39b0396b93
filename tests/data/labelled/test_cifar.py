"""CIFAR's binary files against arrays that were written into them."""

import pickle

import numpy as np
import pytest

from probemb.data.labelled import find_images, resolve_classes
from probemb.errors import UserError

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write(file, labels, coarse=None, seed=0):
    """Random pixels (N, 32, 32, 3) written as CIFAR has them; returned as they should be read."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as out:
        for i, label in enumerate(labels):
            out.write(bytes([label] if coarse is None else [coarse[i], label]))
            for channel in range(3):
                out.write(pixels[i, :, :, channel].tobytes())
    return pixels


@pytest.mark.parametrize(
    ("kind", "file", "names_file", "coarse"),
    [
        ("cifar-10-batches-bin", "test_batch.bin", "batches.meta.txt", None),
        ("cifar-100-binary", "test.bin", "fine_label_names.txt", [3, 7, 1]),
    ],
)
def test_pictures_and_labels_of_the_test_batch(tmp_path, kind, file, names_file, coarse):
    names = TEN if coarse is None else [f"thing_{i}" for i in range(100)]
    labels, folder = [3, len(names) - 1, 0], tmp_path / kind
    pixels = write(folder / file, labels, coarse)
    write(folder / file.replace("test", "train").replace("train_batch", "data_batch_1"), [1, 2], coarse, seed=1)
    (folder / names_file).write_text("\n".join(names) + "\n\n")
    for data in (folder, tmp_path, folder / file):
        images = find_images(data)
        classes, found = resolve_classes(images, None)
        assert found == labels
        assert classes.names == tuple(name.replace("_", " ") for name in names)
        assert all(np.array_equal(np.asarray(images.open(i)), pixels[i]) for i in range(3))
        assert len({place.name for place in images.places}) == 3


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"is the Python version of CIFAR: pickles") as refused:
        find_images(tmp_path)
    assert "binary version" in str(refused.value)
