"""Finding labelled images, what labels mean, and reading."""

import io

import pytest
from PIL import Image
from timm.data import ImageNetInfo
from torchvision.transforms.functional import to_tensor

from probemb.data.image_loader import ImageBatches, describe_bad
from probemb.data.labelled import find_images, imagenet_classes, resolve_classes
from probemb.errors import UserError
from tests.world import N_CLASSES, save, write_samples, write_tar


@pytest.fixture(scope="module")
def folders(tmp_path_factory, pictures, names):
    root = tmp_path_factory.mktemp("folders")
    for i, (label, data) in enumerate(pictures):
        save(root / names[label].replace(" ", "_") / f"{i}.JPEG", data)
    (root / "README.txt").write_text("no image")
    return root


def test_shards_a_tar_and_folders_give_the_same_pictures(shards, folders, pictures, names, tmp_path):
    sets = {
        "shards": find_images(shards),
        "pattern": find_images(f"{shards}/{{00000..00001}}.tar"),
        "folders": find_images(folders),
    }
    members = [(f"val/{names[label].replace(' ', '_')}/{i}.JPEG", data) for i, (label, data) in enumerate(pictures)]
    sets["tar"] = find_images(write_tar(tmp_path / "val.tar", members))
    expected = sorted((names[label], Image.open(io.BytesIO(data)).tobytes()) for label, data in pictures)
    for kind, images in sets.items():
        classes, labels = resolve_classes(images, None)
        found = sorted((classes.names[label], images.open(i).tobytes()) for i, label in enumerate(labels))
        assert found == expected, kind
        assert len({place.name for place in images.places}) == len(pictures)


def test_class_folders_may_be_links_to_one(tmp_path, pictures):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(pictures[0][1])
    (tmp_path / "a" / "back").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert [place.name for place in find_images(tmp_path).places] == ["a/x.jpg", "b/x.jpg"]


def test_a_flat_tar_needs_a_label_file(pictures, tmp_path):
    members = [(f"ILSVRC2012_val_{i:08d}.JPEG", data) for i, (_, data) in enumerate(pictures)]
    tar = write_tar(tmp_path / "val.tar", members)
    with pytest.raises(UserError, match=r"in no class folder.* --labels"):
        find_images(tar)
    lists = tmp_path / "val.txt"
    lists.write_text("".join(f"{name} {label}\n" for (name, _), (label, _) in zip(members, pictures)))
    assert find_images(tar, lists).marks == [label for label, _ in pictures]
    lists.write_text(
        "ImageId,PredictionString\n"
        + "".join(f"{name[:-5]},n0000000{label} 1 2 3 4\n" for (name, _), (label, _) in zip(members, pictures))
    )
    images = find_images(tar, lists)
    assert images.folders == [f"n0000000{i}" for i in range(N_CLASSES)]
    lists.write_text(f"{members[0][0]} 0\n")
    assert len(find_images(tar, lists).bad) == 31


def test_a_thousand_wordnet_folders_are_imagenet(tmp_path, pictures):
    ids = ImageNetInfo("imagenet-1k").label_names()
    for one in ids:
        (tmp_path / one).mkdir()
    (tmp_path / ids[389] / "x.jpg").write_bytes(pictures[0][1])
    classes, labels = resolve_classes(find_images(tmp_path), None)
    assert labels == [389]
    assert classes.names == imagenet_classes().names
    assert classes.keys == tuple(ids)
    assert classes.names[ids.index("n02123045")] == "tabby cat"
    (tmp_path / ids[0]).rename(tmp_path / "n00000001")  # no class of ImageNet
    with pytest.raises(UserError, match="does not say what they are called"):
        resolve_classes(find_images(tmp_path), None)


@pytest.fixture
def with_bad(tmp_path, pictures):
    samples = [{"jpg": data, "cls": str(label)} for label, data in pictures]
    samples[3]["jpg"], samples[17]["jpg"], samples[9]["cls"] = samples[3]["jpg"][:200], b"<html>", "seven"
    return find_images(write_samples(tmp_path / "bad.tar", samples))


def test_unreadable_images_are_counted_named_and_left_out(with_bad):
    batches = ImageBatches(with_bad, to_tensor, batch_size=5, workers=2, max_bad=0.1)
    assert sum(len(batch) for batch in batches) == 29
    assert [with_bad.places[i].name for i in batches.kept] == [f"{i:03d}" for i in range(32) if i not in (3, 9, 17)]
    assert sorted(name for name, _ in batches.bad) == ["003", "009", "017"]
    assert "3 images left out: 009 (the cls is not a class index" in describe_bad(batches.bad)
    assert describe_bad([]) == ""
    with pytest.raises(ZeroDivisionError):  # a fault of the transform is none of the image
        list(ImageBatches(with_bad, lambda image: 1 / 0, batch_size=5, max_bad=1))


@pytest.fixture
def benchmark(tmp_path, pictures, names):
    """Eleven test shards, so that 10.tar comes after 9.tar, and one for training."""
    for split, shards in (("test", 11), ("train", 1)):
        for number in range(shards):
            some = pictures[2 * number : 2 * number + 2]
            write_samples(
                tmp_path / split / f"{number}.tar", [{"cls": str(label), "jpg": data} for label, data in some]
            )
        (tmp_path / split / "nshards.txt").write_text(f"{shards}\n")
    (tmp_path / "classnames.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\nart of the {c}.\n")
    return tmp_path


def test_the_test_split_is_taken_in_the_order_of_its_shards(benchmark, pictures, names):
    images = find_images(benchmark)
    classes, labels = resolve_classes(images, None)
    assert labels == [label for label, _ in pictures[:22]]
    assert [place.name.split(":")[0] for place in images.places[::2]] == [f"{i}.tar" for i in range(11)]
    assert classes.names == tuple(names)
    assert images.templates == ("a photo of a {}.", "art of the {}.")
