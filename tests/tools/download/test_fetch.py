"""A shard of addresses through img2dataset: what is kept, what is lost and why, and what a full disk leaves behind."""

import io
import json
import resource
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from probemb.data.images import decode_image
from probemb.data.weblists.corpora import Row
from tests.imagesite import picture, serve_images
from tests.shards import iterate_samples
from tools.download.fetch import Fetcher
from tools.download.options import Download
from tools.download.plan import write_plan
from tools.download.shard import STATE, ShardPaths, read_marker, read_records
from tools.shards import check_shard

SETTINGS = {
    "image_size": 64, "resize": "keep_ratio", "upscale": False, "min_size": 16, "quality": 90, "hash": "sha256",
    "shard_size": 100,
}  # fmt: skip
GOOD = ("ok/a", "moved/b", "chunked/c", "mislabelled/d", "large/e", "alpha/f", "cmyk/g", "webp/h", "same/1", "nobots/i")
BAD = {
    "same/2": "duplicate image",
    "gone": "HTTP 404",
    "status/403/x": "HTTP 403",
    "loop": "redirects",
    "chain/0": "redirects",
    "html": "HTML, no image",
    "text": "no image",
    "gif": "GIF image",
    "tiff": "TIFF image",
    "gzip": "gzip-encoded",
    "inward": "redirect to another scheme",
    "empty": "empty answer",
    "half": "broken image",
    "bomb": "broken image",
    "strip": "broken image",
    "tiny": "too small",
    "noai": "opted out",
    "announced": "too many bytes",
    "endless": "too many bytes",
    "silent": "no answer",
    "drip": "too slow",
    "dripheaders": "too slow",
    "cut": "cut off",
    "reset": "connection",
}


@pytest.fixture(scope="module")
def site():
    with serve_images() as site:
        yield site


def fetch(folder, addresses, settings=None, extra=None, **options):
    """The shard's paths, and whether it was finished."""
    for name in ("plan", "records", "work"):
        (folder / STATE / name).mkdir(parents=True, exist_ok=True)
    rows = [(f"{i:09d}", Row(address, f"caption {i} of it", extra or {})) for i, address in enumerate(addresses)]
    write_plan(folder, 0, rows)
    options = {"seconds": 4, "patience": 2, "max_mib": 1, "threads": 16, "private_hosts": True} | options
    given = Download(**options)
    fetcher = Fetcher(folder, given, SETTINGS | (settings or {}))
    paths = ShardPaths(folder, 0)
    return paths, fetcher((0, str(paths.plan)))[0]


def causes(paths, addresses) -> dict[str, str]:
    found = {row["key"]: row["cause"] for row in read_records(paths)}
    assert len(found) == len(addresses)
    return {address: found[f"{i:09d}"] for i, address in enumerate(addresses)}


@pytest.fixture(scope="module")
def fetched(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fetched")
    words = [*GOOD, *BAD]
    paths, done = fetch(folder, [f"{site.address}/{word}" for word in words], extra={"subreddit": "pics"})
    assert done
    return SimpleNamespace(paths=paths, causes=causes(paths, words), folder=folder)


def test_every_row_has_its_cause(fetched):
    """Of the two that are the same image, the one that came second is lost."""
    wanted = dict.fromkeys(GOOD, "got") | BAD
    if fetched.causes["same/2"] == "got":
        wanted |= {"same/1": "duplicate image", "same/2": "got"}
    assert fetched.causes == wanted


def test_the_tar_is_what_training_reads(fetched):
    seen = check_shard(fetched.paths.tar, None)
    assert (seen.samples, seen.bad, seen.skipped, seen.damage) == (len(GOOD), 0, 0, [])
    marker = read_marker(fetched.paths)
    assert (marker.samples, marker.bytes) == (len(GOOD), fetched.paths.tar.stat().st_size)
    assert sum(marker.causes.values()) == len(GOOD) + len(BAD)
    assert sum(marker.sides) == sum(marker.aspects) == sum(marker.words) == len(GOOD)


def test_samples_hold_image_caption_and_origin(fetched, site):
    samples = {sample.key: sample for sample in iterate_samples(fetched.paths.tar)}
    first = samples["000000000"]
    assert first.captions == ["caption 0 of it"]
    assert first.meta["url"] == f"{site.address}/ok/a"
    assert first.meta["subreddit"] == "pics"
    assert (first.meta["original_width"], first.meta["original_height"]) == (96, 64)
    shown, sent = decode_image(first.image), decode_image(picture("a"))
    assert shown.size == sent.size == (96, 64)  # the shorter side is 64 already
    assert np.abs(np.asarray(shown, int) - np.asarray(sent, int)).mean() < 4
    assert decode_image(samples["000000004"].image).size == (96, 64)  # was 900 x 600


def test_nothing_else_is_left(fetched):
    assert sorted(path.name for path in fetched.folder.iterdir()) == ["00000.tar", "download"]
    names = sorted(path.name for path in (fetched.folder / STATE / "records").iterdir())
    assert names == ["00000.json", "00000.parquet"]


def test_colours_and_transparency_survive(site, tmp_path):
    paths, _ = fetch(tmp_path, [f"{site.address}/alpha/f", f"{site.address}/cmyk/g"])
    for sample, form, mode in zip(iterate_samples(paths.tar), ("PNG", "JPEG"), ("RGBA", "CMYK")):
        name = sample.meta["url"][-1]
        shown = np.asarray(decode_image(sample.image), int)
        assert np.abs(shown - np.asarray(decode_image(picture(name, form=form, mode=mode)), int)).mean() < 4


@pytest.mark.parametrize(
    ("resize", "size"),
    [("keep_ratio", (96, 64)), ("keep_ratio_largest", (64, 43)), ("center_crop", (64, 64)), ("border", (64, 64)),
     ("no", (900, 600))],
)  # fmt: skip
def test_resizing(site, tmp_path, resize, size):
    paths, _ = fetch(tmp_path, [f"{site.address}/large/e"], {"resize": resize})
    (sample,) = iterate_samples(paths.tar)
    shown = decode_image(sample.image)
    assert shown.size == size
    assert (min(shown.getpixel((32, 2))) > 240) == (resize == "border")  # white above and below
    assert (sample.meta["width"], sample.meta["height"]) == size


def test_pictures_stored_on_their_side_become_upright(site, tmp_path):
    paths, _ = fetch(tmp_path, [f"{site.address}/turned/{orientation}" for orientation in range(1, 9)])
    samples = list(iterate_samples(paths.tar))
    assert len(samples) == 8
    for sample in samples:
        image = Image.open(io.BytesIO(sample.image))
        assert (image.size, dict(image.getexif())) == ((98, 64), {})
        corners = [image.getpixel(place) for place in ((20, 10), (70, 10), (20, 50))]
        assert [tuple(level // 200 for level in corner) for corner in corners] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
        assert (sample.meta["width"], sample.meta["original_width"]) == (98, 640)


def test_upscaling_is_asked_for(site, tmp_path):
    paths, _ = fetch(tmp_path, [f"{site.address}/ok/a"], {"image_size": 128, "upscale": True})
    (sample,) = iterate_samples(paths.tar)
    assert decode_image(sample.image).size == (192, 128)


def test_quality_and_hash(site, tmp_path):
    sizes = []
    for quality in (20, 95):
        paths, _ = fetch(tmp_path / str(quality), [f"{site.address}/ok/a"], {"quality": quality, "hash": "md5"})
        (sample,) = iterate_samples(paths.tar)
        sizes.append(len(sample.image))
        assert len(sample.meta["md5"]) == 32
        assert Image.open(io.BytesIO(sample.image)).format == "JPEG"
    assert sizes[0] < sizes[1]


def test_opting_out(site, tmp_path):
    words = ("noai", "nobots/i", "ok/a")
    addresses = [f"{site.address}/{word}" for word in words]
    paths, _ = fetch(tmp_path / "named", addresses, user_agent="Probemb")
    assert list(causes(paths, words).values()) == ["opted out", "opted out", "got"]
    assert any("probemb" in agent for agent in site.agents)
    paths, _ = fetch(tmp_path / "all", addresses, respect_opt_out=False)
    assert set(causes(paths, words).values()) == {"got"}


def test_a_shard_without_an_image_has_no_tar(site, tmp_path):
    paths, done = fetch(tmp_path, [f"{site.address}/gone", f"{site.address}/html"])
    assert done
    assert not paths.tar.exists()
    assert read_marker(paths).causes == {"HTTP 404": 1, "HTML, no image": 1}


def test_private_hosts_are_left_alone(site, tmp_path):
    before = sum(site.requests.values())
    paths, _ = fetch(tmp_path, [f"{site.address}/ok/a"], private_hosts=False)
    assert read_marker(paths).causes == {"private address": 1}
    assert sum(site.requests.values()) == before


def test_no_room(site, tmp_path, capfd):
    """Files may have no more than 40 kB: nothing half is left, the rest is not asked for, and it can go on."""
    addresses = [f"{site.address}/ok/{i}" for i in range(90)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sum(site.requests.values())
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        paths, done = fetch(tmp_path, addresses, {"resize": "no"}, threads=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not done
    assert paths.error.read_text() == "File too large"
    assert sum(site.requests.values()) - before < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["download"]
    assert read_marker(paths) is None
    assert "Traceback" not in capfd.readouterr().err
    paths, done = fetch(tmp_path, addresses, {"resize": "no"})
    assert done
    assert read_marker(paths).samples == 90
    assert not paths.error.exists()


def test_hostile_extras_stay_text(site, tmp_path):
    paths, _ = fetch(tmp_path, [f"{site.address}/ok/a"], extra={"subreddit": "../../etc", "image_id": "</script>"})
    (sample,) = iterate_samples(paths.tar)
    assert sample.meta["subreddit"] == "../../etc"
    assert json.dumps(sample.meta)
    assert sample.key == "000000000"
