"""CLIP_benchmark's layout: splits, names, templates, and what is missing."""

import pytest

from probemb.data.labelled.images import find_images, resolve_classes
from tests.world import write_tar


@pytest.fixture
def benchmark(tmp_path, pictures, names):
    """Eleven test shards, so that 10.tar comes after 9.tar, and one for training."""
    for split, shards in (("test", 11), ("train", 1)):
        for number in range(shards):
            members = []
            for i, (label, data) in enumerate(pictures[2 * number : 2 * number + 2]):
                members += [(f"s{number:04d}{i}.cls", str(label).encode()), (f"s{number:04d}{i}.jpg", data)]
            write_tar(tmp_path / split / f"{number}.tar", members)
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
