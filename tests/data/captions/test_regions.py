"""SCAN's and VSRN's files: features of regions beside captions; what belongs together, and what is refused."""

import numpy as np
import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.data.image_loader import ImageBatches
from probemb.errors import UserError
from probemb.evaluation.embedding import exact_match
from tools.make_scenes.command import main as make_scenes

R, W = 4, 6


def write(folder, name="train", n=7, times=1, dtype=np.float32, captions=5, array=None):
    """NAME_ims.npy and NAME_caps.txt; returns the regions of the n images, (n, R, W)."""
    folder.mkdir(parents=True, exist_ok=True)
    regions = np.random.RandomState(0).randn(n, R, W).astype(dtype)
    np.save(folder / f"{name}_ims.npy", np.repeat(regions, times, 0) if array is None else array)
    lines = [f"caption {k} of image {i}" for i in range(n) for k in range(captions)]
    (folder / f"{name}_caps.txt").write_text("\n".join(lines) + "\n")
    return regions


@pytest.mark.parametrize(("times", "dtype"), [(1, np.float16), (5, np.float32)])
def test_every_image_has_its_own_regions_and_captions(tmp_path, times, dtype):
    regions = write(tmp_path, times=times, dtype=dtype)
    found = find_captions(tmp_path, "train")
    assert found.captions[3] == [f"caption {k} of image 3" for k in range(5)]
    assert (found.images.shape, len(found.images)) == ((R, W), 7)
    for i in range(7):
        assert torch.equal(found.images.open(i), torch.from_numpy(regions[i].astype(np.float32)))
    assert torch.equal(found.only([5, 2]).images.open(0), found.images.open(5))
    batches = ImageBatches(found.images, lambda x: x, 4, workers=1)
    assert torch.equal(torch.cat(list(batches)), torch.from_numpy(regions.astype(np.float32)))


def test_scenes_as_regions_have_every_true_match(tmp_path):
    """The same truth as the shards of the same scenes; that of other captions is refused."""
    make_scenes([str(tmp_path / "scenes"), "--train", "0", "--val", "12", "--classes-images", "0", "--boxes"])
    regions, shards = find_captions(tmp_path / "scenes/regions", "val"), find_captions(tmp_path / "scenes/val")
    assert regions.captions == shards.captions
    assert torch.equal(exact_match(regions), exact_match(shards))
    (tmp_path / "scenes/regions/test_truth.npz").replace(tmp_path / "scenes/regions/dev_truth.npz")
    with pytest.raises(UserError, match=r"dev_truth\.npz is not the truth .*: it does not know"):
        find_captions(tmp_path / "scenes/regions", "val")


@pytest.mark.parametrize("array", [np.zeros((8, R, W), np.float32), np.array([{}] * 7, object)])
def test_refused_arrays(tmp_path, array):
    write(tmp_path, array=array)
    with pytest.raises(UserError, match="is not an array of regions: "):
        find_captions(tmp_path, "train")
