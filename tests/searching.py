"""A small gallery with captions that mean harm, embedded and indexed by the project's own commands."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from probemb import Gaussian
from probemb.data.shards.index import Shard, write_index
from probemb.search.embeddings import open_embeddings
from tests.world import jpeg, write_tar
from tools.build_index import main as build
from tools.embed import main as embed
from tools.make_scenes.captions import draw_captions
from tools.make_scenes.world import scene
from tools.search.command import open_searchers, parse

N = 40
EVIL = '<script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">'
BACKWARDS = "photo of \u202egnp.exe\u2066 \x1b[31mred"
HOSTILE_URLS = ("javascript:alert(1)", "https://bank.example@evil.example/", "https://x.example/\u202egnp.exe", 7)
MARKUP = "[red]not markup[/red] & <b>bold</b>"


@dataclass(frozen=True)
class Gallery:
    """Paths of everything, and the gallery as the embeddings folder has it."""

    model: Path
    tar: Path
    images: Path
    texts: Path
    embedded: Gaussian
    captions: list
    jpegs: list


@pytest.fixture(scope="session")
def gallery(tmp_path_factory, run_folder):
    """Forty scenes with three captions each, as an index of images and one of captions."""
    folder = tmp_path_factory.mktemp("gallery")
    members, told, jpegs = [], [], []
    for i in range(N):
        one = scene("test", i)
        row = {"captions": [caption.text for caption in draw_captions(one, 3)]}
        if i < 3:
            row = {"captions": [(EVIL, BACKWARDS, MARKUP)[i], "a further caption", "a third one"]}
        row["url"] = HOSTILE_URLS[i] if i < len(HOSTILE_URLS) else f"https://photos.example/{i}.jpg?a=1&b=2"
        told.append([one["caption"] if isinstance(one, dict) else one for one in row["captions"]])
        jpegs.append(jpeg(one))
        members += [(f"{i:03d}<i>.jpg", jpegs[-1]), (f"{i:03d}<i>.json", json.dumps(row).encode())]
    tar = write_tar(folder / "data" / "00000.tar", members)
    write_index(tar.parent, [Shard(tar.name, tar, N, tar.stat().st_size)])
    out = folder / "embedded"
    assert embed(["--model", str(run_folder), "--data", str(tar.parent), "--out", str(out)]) == 0
    for kind in ("image", "text"):
        assert build(["--embeddings", str(out), "--kind", kind, "--out", str(folder / kind)]) == 0
    opened = open_embeddings(out)
    mean, u = opened.read(opened.partitions("image")[0])
    mean = torch.from_numpy(mean.astype(np.float32))
    log_var = torch.from_numpy(u).div(mean.shape[1]).log()[:, None].expand_as(mean)
    return Gallery(run_folder, tar, folder / "image", folder / "text", Gaussian(mean, log_var), told, jpegs)


@pytest.fixture(scope="session")
def searcher(gallery):
    """Over the images, without a calibration."""
    return open_searcher(gallery.images)


def open_searcher(folder, *options):
    """The searcher of an index, as the command opens it."""
    (found,) = open_searchers(parse(["anything", "--index", str(folder), "--device", "cpu", *options])).values()
    return found
