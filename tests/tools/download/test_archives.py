"""COCO and Flickr8k from archives as they are published, small ones made here, and real ones where they are."""

import errno
import io
import json
import os
import signal
import tarfile
import time
import zipfile

import pytest

from probemb.data.captions.find import find_captions
from probemb.data.images import decode_image
from probemb.data.remote.sources import FetchPolicy
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import picture, serve_images
from tests.shards import iterate_samples
from tests.webserver import serve
from tools.download.command import main
from tools.download.zips import fetch_archive
from tools.shards import main as shards_command

TRAIN, VAL = range(9, 21), range(100, 106)


def write_coco(folder, damaged=()):
    """train2014.zip, val2014.zip and annotations_trainval2014.zip; image 11 is missing, 13 has no caption."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "annotations_trainval2014.zip", "w", zipfile.ZIP_DEFLATED) as captions:
        for split, ids in (("train", TRAIN), ("val", VAL)):
            names = {i: f"COCO_{split}2014_{i:012d}.jpg" for i in ids}
            with zipfile.ZipFile(folder / f"{split}2014.zip", "w") as images:
                for i, name in names.items():
                    if i != 11:
                        images.writestr(f"{split}2014/{name}", b"junk" if i in damaged else picture(i % 18, (90, 70)))
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


def download(capsys, *words) -> dict:
    assert main([*words, "--processes", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(*words) -> str:
    with pytest.raises(UserError) as error:
        main([*words, "--processes", "1"])
    return str(error.value)


def test_coco(tmp_path, capsys):
    zips, out = write_coco(tmp_path / "zips", damaged={12}), tmp_path / "out"
    report = download(capsys, "coco", *zips, "--out", str(out), "--shard-size", "4")
    assert report["splits"] == {"train": 9, "val": 6}
    assert report["lost"] == {"not in the archives": 1, "broken image": 1, "no caption": 1}
    assert report["asked"] == 18 == report["got"] + 3
    assert report["not_asked_yet"] == 0
    for split in ("train", "val"):
        assert shards_command(["verify", str(out / split), "--workers", "1"]) == 0
        assert all(shard.sha256 for shard in read_index(out / split))
    samples = {sample.key: sample for sample in iterate_samples(read_index(out / "train"))}
    assert sorted(samples) == [f"{i:012d}" for i in TRAIN if i not in (11, 12, 13)]
    first = samples["000000000009"]
    assert first.image == picture(9, (90, 70))  # the published bytes
    assert first.captions[:2] == ["Thing 9, seen 0.", "Thing 9, seen 1."]
    assert first.meta["image_id"] == 9
    assert first.meta["captions"][4] == {"id": 94, "caption": "Thing 9, seen 4."}
    assert "coco_ids" not in first.meta


def test_what_finetuning_reads(tmp_path, capsys):
    out = tmp_path / "out"
    download(capsys, "coco", *write_coco(tmp_path / "zips"), "--out", str(out))
    data = find_captions(out, "val")
    assert data.image_ids == list(VAL)
    assert data.caption_ids[1] == [1010 + k for k in range(5)]
    assert data.captions[0][0] == "Thing 100, seen 0."


def test_the_same_image_twice_stays_twice(tmp_path, capsys):
    """A benchmark's images are what they are: 9 and 27 have equal bytes, and so have 100 and 10."""
    out = tmp_path / "out"
    assert download(capsys, "coco", *write_coco(tmp_path / "zips"), "--out", str(out))["splits"]["val"] == 6


def test_archives_from_a_server_that_breaks_off(tmp_path, capsys):
    write_coco(tmp_path / "zips")
    with serve(tmp_path / "zips") as site:
        site.troubles["val2014.zip"] = ["cut", 503]
        words = [f"{site.address}/{name}2014.zip" for name in ("train", "val", "annotations_trainval")]
        out = tmp_path / "out"
        assert download(capsys, "coco", *words, "--out", str(out))["splits"] == {"train": 10, "val": 6}
        asked = len(site.requests)
        assert download(capsys, "coco", *words, "--out", str(out))["splits"] == {"train": 10, "val": 6}
        assert len(site.requests) == asked
        assert "HTTP 404" in refused("coco", f"{site.address}/none.zip", "--out", str(tmp_path / "other"))


def test_a_transfer_goes_on_with_the_next_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tools.download.zips.FetchPolicy", lambda timeout: FetchPolicy(attempts=1, timeout=timeout))
    write_coco(tmp_path / "zips")
    with serve(tmp_path / "zips") as site:
        words = [f"{site.address}/{name}2014.zip" for name in ("train", "val", "annotations_trainval")]
        out = tmp_path / "out"
        site.troubles["val2014.zip"] = ["cut", 503]
        assert "broke off" in refused("coco", *words, "--out", str(out))
        assert "503" in refused("coco", *words, "--out", str(out))
        assert download(capsys, "coco", *words, "--out", str(out))["splits"] == {"train": 10, "val": 6}
        half = (tmp_path / "zips" / "val2014.zip").stat().st_size // 2
        assert [asked for name, asked in site.requests if name == "val2014.zip"] == [
            None, f"bytes={half}-", f"bytes={half}-",
        ]  # fmt: skip


def test_nothing_of_an_older_archive_stays(tmp_path, monkeypatch):
    """The server has another version, a shorter one, when the transfer goes on."""
    monkeypatch.setattr("tools.download.zips.FetchPolicy", lambda timeout: FetchPolicy(attempts=1, timeout=timeout))
    old, new = tmp_path / "site" / "x.txt", b"new"
    old.parent.mkdir()
    old.write_bytes(bytes(1000))
    with serve(old.parent, ranges=False) as site:
        site.troubles["x.txt"] = ["cut"]
        with pytest.raises(UserError, match="broke off"):
            fetch_archive(f"{site.address}/x.txt", tmp_path / "archives")
        old.write_bytes(new)
        assert fetch_archive(f"{site.address}/x.txt", tmp_path / "archives").read_bytes() == new


def test_a_page_in_place_of_an_archive_is_not_kept(tmp_path, capsys):
    write_coco(tmp_path / "zips")
    archive = tmp_path / "zips" / "val2014.zip"
    whole = archive.read_bytes()
    with serve(tmp_path / "zips") as site:
        words = [f"{site.address}/{name}2014.zip" for name in ("annotations_trainval", "val")]
        archive.write_bytes(b"<html>Log in</html>")
        out = ["--out", str(tmp_path / "out")]
        assert f"What {words[1]} sends is not a zip archive" in refused("coco", *words, *out)
        archive.write_bytes(whole)
        assert download(capsys, "coco", *words, *out)["splits"]["val"] == 6


@pytest.mark.parametrize("way", ["garbage", "loop"])
def test_what_a_server_says_is_one_line(tmp_path, monkeypatch, way):
    monkeypatch.setattr("tools.download.zips.FetchPolicy", lambda timeout: FetchPolicy(attempts=1, timeout=timeout))
    with serve_images() as site:
        told = refused("coco", f"{site.address}/{way}/x.zip", "--out", str(tmp_path / "out"))
    assert "cannot be fetched" in told
    assert "\n" not in told


def test_no_room_for_an_archive(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    zips, out = write_coco(tmp_path / "zips"), str(tmp_path / "out")
    with serve(tmp_path / "zips") as site, monkeypatch.context() as patched:
        patched.setattr("tools.download.zips._ProgressFile.write", full)
        told = refused("coco", *zips[:2], f"{site.address}/val2014.zip", "--out", out)
    assert "There is no room left in" in told
    assert "data.cache" not in told


def test_a_wrong_archive_settles_nothing(tmp_path, capsys):
    zips, out = write_coco(tmp_path / "zips"), str(tmp_path / "out")
    assert "no captions" in refused("coco", *zips[1:], "--out", out, "--resize", "border")
    download(capsys, "coco", *zips, "--out", out)


def test_patience_with_a_silent_server(tmp_path):
    (tmp_path / "site").mkdir()
    with serve(tmp_path / "site") as site:
        site.troubles["x.zip"] = ["silence", 404]
        started = time.monotonic()
        assert "404" in refused("coco", f"{site.address}/x.zip", "--out", str(tmp_path / "out"), "--patience", "0.3")
        assert time.monotonic() - started < 15


def test_other_captions_are_not_mixed_with_those_of_before(tmp_path, capsys):
    first, out = write_coco(tmp_path / "a"), str(tmp_path / "out")
    download(capsys, "coco", *first, "--out", out)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as other:
        annotation = {"image_id": 1, "id": 1, "caption": "new"}
        content = {"images": [{"id": 1, "file_name": "x.jpg", "height": 70}], "annotations": [annotation]}
        other.writestr("captions_val2017.json", json.dumps(content))
    images = [one for one in first if "annotations" not in one]
    message = refused("coco", *images, str(tmp_path / "b.zip"), "--out", out)
    assert "holds other images or captions of val" in message
    assert download(capsys, "coco", *first, "--out", out)["got"] > 0


def test_captions_without_measure_and_damaged_records(tmp_path, capsys):
    images = write_flickr(tmp_path)
    text = tmp_path / "Flickr8k.token.txt"
    text.write_text("1_a.jpg#0\t" + "long " * 300_000 + "\n2_b.jpg#0\tshort\n")
    archives = [str(path) for path in tmp_path.glob("*Dataset*.zip")]
    report = download(capsys, "flickr8k", *archives, str(text), "--out", str(tmp_path / "out"))
    assert report["got"] == 1
    assert report["lost"] == {"malformed row": 1}
    assert images


def test_images_that_come_later(tmp_path, capsys):
    zips, out = write_coco(tmp_path / "zips"), tmp_path / "out"
    annotations, train, val = zips
    report = download(capsys, "coco", annotations, val, "--out", str(out), "--shard-size", "4")
    assert report["splits"] == {"train": 0, "val": 6}
    before = {path: path.stat().st_mtime_ns for path in (out / "val").glob("*.tar")}
    report = download(capsys, "coco", annotations, train, val, "--out", str(out), "--shard-size", "4")
    assert report["splits"] == {"train": 10, "val": 6}
    assert {path: path.stat().st_mtime_ns for path in (out / "val").glob("*.tar")} == before


def test_resizing_and_processes(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["coco", *write_coco(tmp_path / "zips"), "--out", str(out), "--resize", "center_crop", "--image-size", "40"]
    assert main([*words, "--processes", "2", "--shard-size", "8", "--json"]) == 0
    for sample in iterate_samples(read_index(out / "val")):
        assert decode_image(sample.image).size == (40, 40)


def be_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_told(tmp_path, monkeypatch):
    words = ["coco", *write_coco(tmp_path / "zips"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("tools.download.archives.write_shard", be_killed)
    with pytest.raises(UserError, match="process was killed") as error:
        main([*words, "--processes", "2", "--shard-size", "4"])
    assert "fewer --processes" in error.value.remedy


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


def test_flickr8k(tmp_path, capsys):
    out = tmp_path / "out"
    report = download(capsys, "flickr8k", *write_flickr(tmp_path / "zips"), "--out", str(out))
    assert report["splits"] == {"train": 1, "val": 1, "test": 1}
    assert report["lost"] == {"malformed row": 1, "in no split": 1}
    (sample,) = iterate_samples(read_index(out / "val"))
    assert (sample.key, sample.image) == ("2_b", picture("2_b"))
    assert sample.captions == ["Seen 2_b 0 .", "Seen 2_b 1 .", "Seen 2_b 2 ."]


def test_flickr_without_splits_and_from_a_folder(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jpg").write_bytes(picture(name))
    token = tmp_path / "results_20130124.token"
    token.write_text("a.jpg#0\tone\na.jpg#1\ttwo\nb.jpg#0\tthree\n")
    report = download(capsys, "flickr8k", str(folder), str(token), "--out", str(tmp_path / "out"))
    assert report["splits"] == {"train": 2}


def test_real_flickr8k(shared_data, tmp_path, capsys):
    """Real pictures and captions, put back into the form in which they are published."""
    folder = tmp_path / "images"
    folder.mkdir()
    lines, truth = [], {}
    with tarfile.open(shared_data("flickr8k") / "val-00000.tar") as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            data = tar.extractfile(member).read()
            if extension == "jpg":
                (folder / member.name).write_bytes(data)
            else:
                truth[key] = data.decode().splitlines()
                lines += [f"{key}.jpg#{k}\t{caption}" for k, caption in enumerate(truth[key])]
            if len(truth) == 50:
                break
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    download(capsys, "flickr8k", str(folder), str(tmp_path / "Flickr8k.token.txt"), "--out", str(out))
    samples = {sample.key: sample for sample in iterate_samples(read_index(out / "train"))}
    assert {key: sample.captions for key, sample in samples.items()} == truth
    assert all((folder / f"{key}.jpg").read_bytes() == sample.image for key, sample in samples.items())


def test_hostile_captions_stay_text(tmp_path, capsys):
    folder, token, out = tmp_path / "images", tmp_path / "x.token", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(picture("a"))
    hostile = '"><script>alert(1)</script>'
    token.write_text(f"a.jpg#0\t{hostile}\n")
    download(capsys, "flickr8k", str(folder), str(token), "--out", str(out))
    (sample,) = iterate_samples(read_index(out / "train"))
    assert sample.captions == [hostile]
    page = (out / "download" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_hostile_archives(tmp_path, capsys):
    """Names that lead elsewhere, a member that is larger than it says, encryption: nothing is unpacked or trusted."""
    zips = write_coco(tmp_path / "zips")
    name = f"COCO_val2014_{100:012d}.jpg"
    with zipfile.ZipFile(tmp_path / "zips" / "val2014.zip", "w", zipfile.ZIP_DEFLATED) as images:
        images.writestr(f"../../../{name}", picture(100, (90, 70)))
        images.writestr("val2014/bomb.jpg", bytes(50 << 20))
        for i in VAL[1:]:
            images.writestr(f"val2014/COCO_val2014_{i:012d}.jpg", picture(i, (90, 70)))
    data = bytearray((tmp_path / "zips" / "val2014.zip").read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(f"val2014/COCO_val2014_{105:012d}.jpg".encode()))
    data[place + 24 : place + 28] = (100).to_bytes(4, "little")  # states 100 bytes
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(f"val2014/COCO_val2014_{104:012d}.jpg".encode()))
    data[place + 8] |= 1  # states encryption
    (tmp_path / "zips" / "val2014.zip").write_bytes(data)
    out = tmp_path / "a" / "b" / "c" / "out"
    report = download(capsys, "coco", *zips, "--out", str(out))
    assert report["splits"]["val"] == 4
    assert report["lost"]["broken image"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "zips"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a whole zip"),
        (b"PK\x03\x04 broken", "not a whole zip"),
        (zipfile.ZipFile, "not a whole zip"),
        ({"images": [], "annotations": []}, "no captions"),
        ({"images": [{"id": 1, "file_name": "../x.jpg"}], "annotations": []}, "not one of COCO's"),
        ({"images": [{"id": 1, "file_name": "x.jpg"}] * 2, "annotations": []}, "not one of COCO's"),
        ({"images": [{"id": 1, "file_name": "x.jpg"}], "annotations": [{"image_id": 2}]}, "not one of COCO's"),
        ([1], "not one of COCO's"),
        ("{", "not one of COCO's"),
    ],
)
def test_captions_that_are_none(tmp_path, content, told):
    path = tmp_path / "annotations.zip"
    if content is zipfile.ZipFile:
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as file:
            file.writestr("captions_val2014.json", os.urandom(1000).hex())
        path.write_bytes(whole.getvalue()[:-40])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as file:
            text = content if isinstance(content, str) else json.dumps(content)
            file.writestr("captions_val2014.json", text)
    assert told in refused("coco", str(path), "--out", str(tmp_path / "out"))


def test_refusals(tmp_path, capsys):
    zips, out = write_coco(tmp_path / "zips"), str(tmp_path / "out")
    assert "No archive of COCO was named" in refused("coco", "--out", out)
    assert "does not exist" in refused("coco", "none.zip", "--out", out)
    assert "in archives" in refused("coco", *zips, "--out", out, "--part", "1/2")
    assert "None of the 18 images" in refused("coco", zips[0], "--out", out)
    assert "no captions" in refused("coco", *zips[1:], "--out", str(tmp_path / "second"))
    assert "hold 0 token files" in refused("flickr8k", *zips, "--out", str(tmp_path / "third"))
    assert "started with --resize no, not border" in refused("coco", *zips, "--out", out, "--resize", "border")
    two = write_flickr(tmp_path / "flickr")
    assert "holds coco, not flickr8k" in refused("flickr8k", *two, "--out", out)
    with zipfile.ZipFile(two[1], "a") as file:
        file.writestr("Flickr_8k.valImages.txt", "1_a.jpg\n")
    assert "Two splits have the image 1_a.jpg" in refused("flickr8k", *two, "--out", str(tmp_path / "fourth"))
