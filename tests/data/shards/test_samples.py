"""From members to samples: grouping, captions, classes; and what webdataset's and open_clip's own loaders read."""

import random

import pytest
import webdataset as wds
from open_clip_train.data import filter_no_caption_or_no_image

from probemb.data.failures import BadSample
from probemb.data.shards.samples import (
    CAPTIONS,
    Member,
    caption_names,
    group_members,
    list_samples,
    parse_sample,
    read_sample,
)
from probemb.data.shards.write import encode_captions, tar_writer
from tests.world import write_tar


def test_grouping_equals_webdataset():
    draw = random.Random(0)
    stems = ["a", "b", "x/a", "x.y/a", "x/b.c"]
    names = list(dict.fromkeys(f"{draw.choice(stems)}.{draw.choice(['jpg', 'TXT', 'json'])}" for _ in range(60)))
    files = [{"fname": name, "data": str(i).encode(), "__url__": "a.tar"} for i, name in enumerate(names)]
    expected = [
        (sample["__key__"], {k: v for k, v in sample.items() if not k.startswith("__")})
        for sample in wds.tariterators.group_by_keys(files)
    ]
    found = group_members(Member(name, i, 1) for i, name in enumerate(names))
    assert [(key, {ext: str(m.offset).encode() for ext, m in parts.items()}) for key, parts in found] == expected


def test_a_sample_has_an_image_and_a_text(tmp_path):
    image = b"an image"
    files = [("a.jpg", image), ("a.txt", b"a dog"), ("b.jpg", image), ("c.txt", b"a cat")]
    files += [("d.png", image), ("d.cls", b"3"), ("d.other", b"x" * 99), ("e.mp4", b"")]
    files += [("f.webp", image), ("f.json", b"{}"), ("g.jpg", image), ("g.long.txt", b"a dog"), ("g.url.csv", b"")]
    path = write_tar(tmp_path / "a.tar", files)
    samples, others = list_samples(path)
    assert [(span.key, sorted(span.parts)) for span in samples] == [
        ("a", ["jpg", "txt"]),
        ("d", ["cls", "png"]),
        ("f", ["json", "webp"]),
        ("g", ["jpg", "long.txt"]),
    ]
    assert len(others) == 3
    with open(path, "rb") as file:
        assert read_sample(file.fileno(), samples[0]) == {"jpg": image, "txt": b"a dog"}


def captions(names=CAPTIONS, **parts):
    return parse_sample({"jpg": b"image", **parts}, names=names).captions


def test_captions_by_source():
    assert captions(txt="a dog\r\n\n  ein Köter \n".encode()) == ["a dog", "ein Köter"]
    assert captions(txt=b"\xef\xbb\xbfa dog") == ["a dog"]
    assert captions(json=b'{"captions": ["a", " ", "b "]}', txt=b"c") == ["a", "b"]
    assert captions(json=b'{"caption": "a\\nb", "url": "x"}', txt=b"c") == ["c"]
    assert captions(json=b'{"caption": "a"}') == ["a"]
    assert captions(txt="one\u2028line".encode()) == ["one\u2028line"]


def test_captions_by_name():
    parts = {"txt": b"", "long.txt": b"a\nb", "json": b'{"x": null, "y": {"z": ["c", "d"]}, "n": 3, "url": "u"}'}
    parts |= {"syn.json": b'{"text": "e"}', "cls": b"1"}
    wanted = {"txt": None, "long.txt": ["a", "b"], "json.x": None, "json.y.z": ["c", "d"], "syn.json.text": ["e"]}
    for name, found in wanted.items():
        assert captions([name, "json.url"], **parts) == (found or ["u"])  # the next one, if the sample lacks it
    assert sorted(caption_names(parts)) == ["json.url", "json.y.z", "long.txt", "syn.json.text"]
    with pytest.raises(BadSample, match=r"json\.n is neither a text nor a list of texts"):
        captions(["json.n"], **parts)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"txt": b"a dog"}, "no image"),
        ({"jpg": b"i", "txt": b"caf\xe9"}, "not UTF-8"),
        ({"jpg": b"i", "json": b"[" * 200_000}, "cannot be parsed"),
        ({"jpg": b"i", "txt": b"a", "cls": b"9" * 5000}, "class index"),
    ],
)
def test_unusable_samples_are_refused_with_the_reason(parts, reason):
    with pytest.raises(BadSample, match=reason):
        parse_sample(parts)


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
    assert not others
