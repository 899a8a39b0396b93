"""COCO and Flickr8k from archives as they are published: small ones made here, and real pictures where they are."""

import json
import zipfile

import pytest

from probemb.data.captions.find import find_captions
from probemb.data.remote import FetchPolicy
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import picture
from tests.webserver import serve
from tests.world import iterate_samples
from tools.download.command import main
from tools.shards import main as shards_command

TRAIN, VAL = range(9, 21), range(100, 106)


def write_coco(folder):
    """train2014.zip, val2014.zip and annotations_trainval2014.zip; 11 is missing, 12 damaged, 13 has no caption."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "annotations_trainval2014.zip", "w", zipfile.ZIP_DEFLATED) as captions:
        for split, ids in (("train", TRAIN), ("val", VAL)):
            names = {i: f"COCO_{split}2014_{i:012d}.jpg" for i in ids}
            with zipfile.ZipFile(folder / f"{split}2014.zip", "w") as images:
                for i, name in names.items():
                    if i != 11:  # 9 and 27, 10 and 100 are equal, and both stay
                        images.writestr(f"{split}2014/{name}", b"junk" if i == 12 else picture(i % 18, (90, 70)))
            content = {
                "images": [{"id": i, "file_name": name, "height": 70} for i, name in names.items()],
                "annotations": [
                    {"image_id": i, "id": 10 * i + k, "caption": f" Thing {i},\nseen {k}. "}
                    for i in ids for k in range(5) if i != 13
                ],
            }  # fmt: skip
            captions.writestr(f"annotations/captions_{split}2014.json", json.dumps(content))
            captions.writestr(f"annotations/instances_{split}2014.json", "{}")
    return sorted(map(str, folder.glob("*.zip")))


def download(out, *words) -> dict:
    assert main([*words, "--out", str(out), "--processes", "2"]) == 0
    return json.loads((out / "download" / "report.json").read_text())


def refused(*words) -> str:
    with pytest.raises(UserError) as error:
        main([*words, "--processes", "1"])
    return str(error.value)


def test_coco(tmp_path):
    zips, out = write_coco(tmp_path / "zips"), tmp_path / "out"
    report = download(out, "coco", *zips, "--shard-size", "4")
    assert (report["asked"], report["got"], report["not_asked_yet"]) == (18, 15, 0)
    assert report["lost"] == {"not in the archives": 1, "broken image": 1, "no caption": 1}
    for split in ("train", "val"):
        assert shards_command(["verify", str(out / split), "--workers", "1"]) == 0
    samples = {sample.key: sample for sample in iterate_samples(out / "train")}
    assert sorted(samples) == [f"{i:012d}" for i in TRAIN if i not in (11, 12, 13)]
    first = samples["000000000009"]
    assert first.image == picture(9, (90, 70))  # the published bytes
    assert first.captions[:2] == ["Thing 9, seen 0.", "Thing 9, seen 1."]
    assert first.meta["captions"][4] == {"id": 94, "caption": "Thing 9, seen 4."}
    data = find_captions(out, "val")  # what finetuning reads
    assert data.image_ids == list(VAL)
    assert data.caption_ids[1] == [1010 + k for k in range(5)]


def test_archives_from_a_server_that_breaks_off(tmp_path, monkeypatch):
    """The next command resumes a transfer, and no page in place of an archive is kept."""
    monkeypatch.setattr("tools.download.archives.FetchPolicy", lambda timeout: FetchPolicy(attempts=1, timeout=timeout))
    write_coco(tmp_path / "zips")
    val = tmp_path / "zips" / "val2014.zip"
    with zipfile.ZipFile(val, "a") as images:
        images.writestr("readme", bytes(300_000))
    half, out = val.stat().st_size // 2, tmp_path / "out"
    with serve(tmp_path / "zips") as site:
        words = ["coco", *(f"{site.address}/{name}2014.zip" for name in ("train", "val", "annotations_trainval"))]
        site.troubles["val2014.zip"] = ["cut", 503]
        assert "broke off" in refused(*words, "--out", str(out))
        assert "503" in refused(*words, "--out", str(out))
        assert download(out, *words)["got"] == 15
        asked = [f"bytes={half >> 16 << 16}-"]
        assert [asked for name, asked in site.requests if name == "val2014.zip"] == [None, *asked, *asked]
        count = len(site.requests)
        assert download(out, *words)["got"] == 15
        assert len(site.requests) == count
        val.write_bytes(b"<html>Log in</html>")
        assert "sends is not a zip archive" in refused(*words, "--out", str(tmp_path / "other"))


def write_flickr(folder, names=("1_a", "2_b", "3_c", "4_d"), splits=("train", "dev", "test")):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "Flickr8k_Dataset.zip", "w") as images:
        for name in names:
            images.writestr(f"Flicker8k_Dataset/{name}.jpg", picture(name))
            images.writestr(f"__MACOSX/._{name}.jpg", b"resource fork")
    with zipfile.ZipFile(folder / "Flickr8k_text.zip", "w") as text:
        lines = [f"{name}.jpg#{k}\tSeen {name} {k} ." for name in names for k in (1, 0, 2)]
        text.writestr("Flickr8k.token.txt", "\n".join([*lines, "2258277193_586949ec62.jpg.1#0\tNo such name ."]))
        text.writestr("Flickr8k.lemma.token.txt", "\n".join(lines))
        text.writestr("readme.txt", "Hello")
        for name, split in zip(names, splits):
            text.writestr(f"Flickr_8k.{split}Images.txt", f"{name}.jpg\n")
    return sorted(map(str, folder.glob("*.zip")))


def test_flickr8k(tmp_path):
    out = tmp_path / "out"
    report = download(out, "flickr8k", *write_flickr(tmp_path / "zips"))
    assert (report["got"], report["lost"]) == (3, {"malformed row": 1, "in no split": 1})
    (sample,) = iterate_samples(out / "val")
    assert (sample.key, sample.image) == ("2_b", picture("2_b"))
    assert sample.captions == ["Seen 2_b 0 .", "Seen 2_b 1 .", "Seen 2_b 2 ."]
    zipfile.ZipFile(tmp_path / "zips" / "Flickr8k_Dataset.zip").extractall(tmp_path / "unpacked")
    text = str(tmp_path / "zips" / "Flickr8k_text.zip")
    assert download(tmp_path / "other", "flickr8k", str(tmp_path / "unpacked"), text)["got"] == 3


def test_hostile_archives(tmp_path):
    """Names that lead elsewhere, a member that is larger than it says, encryption: nothing is unpacked or trusted."""
    zips = write_coco(tmp_path / "zips")
    val, names = tmp_path / "zips" / "val2014.zip", [f"COCO_val2014_{i:012d}.jpg" for i in VAL]
    with zipfile.ZipFile(val, "w", zipfile.ZIP_DEFLATED) as images:
        images.writestr(f"../../../{names[0]}", picture(100, (90, 70)))
        images.writestr("val2014/bomb.jpg", bytes(50 << 20))
        for name in names[1:]:
            images.writestr(f"val2014/{name}", picture(name, (90, 70)))
    data = bytearray(val.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(names[5].encode()))
    data[place + 24 : place + 28] = (100).to_bytes(4, "little")  # states 100 bytes
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(names[4].encode()))
    data[place + 8] |= 1  # states encryption
    val.write_bytes(data)
    out = tmp_path / "a" / "b" / "c" / "out"
    assert download(out, "coco", *zips)["lost"]["broken image"] == 1 + 2
    assert sum(shard.samples for shard in read_index(out / "val")) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "zips"]
