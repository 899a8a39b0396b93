"""CIFAR's binary files against arrays that were written into them."""

import pickle

import numpy as np
import pytest

from probemb.data.labelled.images import find_images, resolve_classes
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


@pytest.fixture
def ten(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    pixels = write(folder / "test_batch.bin", [3, 9, 0])
    write(folder / "data_batch_1.bin", [1, 2], seed=1)
    write(folder / "data_batch_2.bin", [5], seed=2)
    (folder / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")
    return folder, pixels


def test_cifar_10_is_its_test_batch(ten):
    folder, pixels = ten
    for data in (folder, folder.parent, folder / "test_batch.bin"):
        images = find_images(data)
        classes, labels = resolve_classes(images, None)
        assert labels == [3, 9, 0]
        assert classes.names == tuple(TEN)
        for i in range(3):
            assert np.array_equal(np.asarray(images.open(i)), pixels[i])
        assert len({place.name for place in images.places}) == 3


def test_cifar_100_has_the_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    pixels = write(folder / "test.bin", [99, 4], coarse=[3, 7])
    names = [f"thing_{i}" for i in range(100)]
    (folder / "fine_label_names.txt").write_text("\n".join(names))
    images = find_images(folder)
    classes, labels = resolve_classes(images, None)
    assert [classes.names[label] for label in labels] == ["thing 99", "thing 4"]
    assert np.array_equal(np.asarray(images.open(1)), pixels[1])


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"is the Python version of CIFAR-10: pickles") as refused:
        find_images(tmp_path)
    assert "binary version" in str(refused.value)
