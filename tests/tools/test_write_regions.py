"""tools.write_regions: grids and proposals against plain loops, read back as data, and what is refused."""

import json
from argparse import Namespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from probemb.data.boxes import find_phrases, read_region_proposals
from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.localisation import crop
from tools import write_regions
from tools.write_regions import file_of, load_backbone, main


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(1)
    return timm.create_model("test_resnet").eval()


@pytest.fixture(scope="module")
def weights(stock, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "stock.safetensors"
    save_file(stock.state_dict(), path)
    return path


def write(data, weights, out, *more, split="val"):
    words = ["--data", str(data), "--split", split, "--out", str(out), "--weights", str(weights)]
    words += ["--model", "test_resnet", "--grid", "3", "--image-size", "96", "--workers", "0", "--batch-size", "3"]
    return main([*words, *more])


def test_regions_are_averages_of_the_map(boxed_scenes, weights, stock, tmp_path, capsys):
    assert write(boxed_scenes, weights, tmp_path, "--grid", "2", "--dtype", "float32") == 0
    data = timm.data.resolve_model_data_config(stock)
    mean, std = (torch.tensor(data[key])[:, None, None] for key in ("mean", "std"))
    mode = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[data["interpolation"]]
    given, found = find_captions(boxed_scenes, "val"), find_captions(tmp_path, "val")
    assert found.captions == given.captions
    assert found.image_ids == [int(one) for one in given.image_ids]
    for i in range(len(given)):
        pixels = torch.from_numpy(np.array(given.images.open(i).resize((96, 96), mode))).permute(2, 0, 1) / 255
        with torch.no_grad():
            (map_Wss,) = stock.forward_features(((pixels - mean) / std)[None])
        side = map_Wss.shape[1]
        rows = [(0, -(-side // 2)), (side // 2, side)]
        expected = [map_Wss[:, a:b, c:d].mean((1, 2)) for a, b in rows for c, d in rows]
        torch.testing.assert_close(found.images.open(i), torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert "dev_ims.npy: 8 x 4 x" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_features_beyond_the_type_are_refused(boxed_scenes, stock, tmp_path):
    state = {
        k: v * 1e4 if k.startswith("layer4.") and v.is_floating_point() else v for k, v in stock.state_dict().items()
    }
    save_file(state, tmp_path / "huge.safetensors")
    with pytest.raises(UserError, match="not finite numbers in float16") as error:
        write(boxed_scenes, tmp_path / "huge.safetensors", tmp_path / "out")
    assert "float32" in error.value.remedy
    assert not list((tmp_path / "out").glob("*"))


def test_images_with_fewer_or_more_than_five_captions(tmp_path, capsys):
    captions = [["a"], ["b", "c  d\n"], list("efghijk"), ["l"]]
    captions_file, ids, regions = (
        file_of(tmp_path, "train", kind) for kind in (write_regions.CAPTIONS, write_regions.IDS, write_regions.REGIONS)
    )
    write_regions.write_captions(captions_file, CaptionDataset(captions, [1, 2, 3, 4]))
    assert "2 captions beyond five" in capsys.readouterr().out
    write_regions.write_lines(ids, [1, 2, 3, 4])
    write_regions.write_array(regions, (4, 2, 3), "float16", iter([np.ones((3, 2, 3)), np.ones((1, 2, 3))]))
    found = find_captions(tmp_path, "train")
    assert found.captions == [["a"], ["b", "c d"], list("efghi"), ["l"]]
    assert found.image_ids == [1, 2, 3, 4]
    assert found.images.open(3).tolist() == [[1.0] * 3] * 2


def test_crops_of_proposals_through_a_backbone(boxed_scenes, weights, stock, tmp_path):
    data = find_phrases(boxed_scenes / "entities", "test")
    boxes = {one: [[0, 0, 20, 30], [5, 5, 48, 48.5], [7.5, 0, 40, 48], [1, 1, 9, 9]] for one in data.image_ids}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    argv = ["--proposals", str(tmp_path / "boxes.json"), "--top", "3", "--dtype", "float32", "--batch-size", "2"]
    assert write(boxed_scenes / "entities", weights, tmp_path, *argv, split="test") == 0
    found = read_region_proposals(tmp_path / "test_ims.npy", data, None)
    assert found.rows[1] == [0, 1, 2]
    backbone = load_backbone(Namespace(model="test_resnet", weights=str(weights), image_size=96, device="cpu"))
    for box, features in zip(found.boxes[1], found.features.open(1)):
        pixels = backbone.transform(crop(data.images.open(1), box))[None]
        with torch.no_grad():
            map_Wss = stock.forward_features(backbone.tower.normalized(pixels, torch.float32))[0]
        torch.testing.assert_close(features, map_Wss.mean((1, 2)), rtol=1e-4, atol=1e-5)
