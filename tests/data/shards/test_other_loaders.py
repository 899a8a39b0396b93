"""The shards that this project writes, read by webdataset's and open_clip's own loaders: every sample has its text."""

import webdataset as wds
from open_clip_train.data import filter_no_caption_or_no_image

from probemb.data.shards.samples import list_samples, parse_sample, read_sample
from probemb.data.shards.writer import encode_captions, tar_writer


def ours(folder):
    """Captions by key, read from KEY.txt alone."""
    captions = {}
    for path in sorted(folder.glob("*.tar")):
        with open(path, "rb") as file:
            for span in list_samples(file)[0]:
                parts = read_sample(file.fileno(), span)
                captions[span.key] = parse_sample({"jpg": b"-", "txt": parts["txt"]}).captions
                assert parse_sample(parts).captions == captions[span.key]
    return captions


def test_open_clips_pipeline_keeps_every_sample(scenes):
    folder, count = scenes / "train", 64
    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(path) for path in sorted(folder.glob("*.tar"))]),
        wds.tarfile_to_samples(),
        wds.select(filter_no_caption_or_no_image),
        wds.decode("pilrgb"),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
    )
    samples = list(pipeline)
    assert {sample["__key__"]: sample["text"].split("\n") for sample in samples} == ours(folder)
    assert len(samples) == count
    assert all(sample["image"].size[0] == 32 for sample in samples)


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("a.tar", "b.tar"):
        with open(tmp_path / name, "wb") as file, tar_writer(file) as tar:
            tar.write({"__key__": "0", "jpg": b"image", "txt": encode_captions(["two\nlines", " ", "ä"])})
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    ((_, parts),), others = list_samples(tmp_path / "a.tar")
    assert list(parts) == ["jpg", "txt"]
    assert others == 0
