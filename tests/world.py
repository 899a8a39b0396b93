"""A tiny model and small pieces of the synthetic world: session-scoped fixtures for every folder."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.data.shards.index import read_index
from probemb.data.shards.samples import list_samples, parse_sample, read_sample
from tools.make_scenes.captions import draw_captions, write_truth
from tools.make_scenes.command import Plan, make
from tools.make_scenes.drawing import render
from tools.make_scenes.world import KINDS, class_scene, scene

N_CLASSES, PER_CLASS = 8, 4


def encode(image, form="JPEG", **options):
    """The bytes of an image."""
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def jpeg(one, size=32):
    return encode(render(one, size), quality=90)


def photograph(width, height, seed=0):
    """Structure at several scales, the finest of single pixels."""
    numbers = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for scale in (4, 16, 64):
        noise = Image.fromarray(numbers.integers(0, 256, (scale, scale, 3), dtype=np.uint8))
        pixels += np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)) / scale**0.5
    pixels += numbers.normal(0, 8, pixels.shape)
    return Image.fromarray((pixels * (255 / pixels.max())).clip(0, 255).astype(np.uint8))


def write_tar(path, files, format=tarfile.USTAR_FORMAT):
    """files: (name, bytes) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def iterate_samples(shards):
    """The samples of indexed shards, in order; each needs a caption or a class index."""
    for shard in read_index(shards):
        with open(shard.path, "rb") as file:
            for span in list_samples(file)[0]:
                yield parse_sample(read_sample(file.fileno(), span), span.key, need_caption=False)


def as_bytes(content):
    """Bytes, a text, or what becomes JSON."""
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    return content if isinstance(content, bytes) else content.encode()


def write_samples(path, samples):
    """A tar of samples, which are numbered: what each holds, by extension."""
    parts = [(f"{i:03d}.{ext}", as_bytes(part)) for i, one in enumerate(samples) for ext, part in one.items()]
    return write_tar(path, parts)


@pytest.fixture(scope="session")
def pictures():
    """(label, JPEG) of 8 classes x 4 images."""
    return [(i % N_CLASSES, jpeg(class_scene("test", 64 * i + i % N_CLASSES))) for i in range(N_CLASSES * PER_CLASS)]


@pytest.fixture(scope="session")
def names():
    return list(KINDS[:N_CLASSES])


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run folder with a random tiny model."""
    from probemb.models import create_model, save_model

    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32"), folder / "model")
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory, pictures, names):
    """Webdataset shards with KEY.cls, in two tars, and classes.txt."""
    folder = tmp_path_factory.mktemp("shards")
    half = len(pictures) // 2
    for number, part in enumerate((pictures[:half], pictures[half:])):
        write_samples(folder / f"{number:05d}.tar", [{"jpg": data, "cls": str(label)} for label, data in part])
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    return folder


@pytest.fixture(scope="session")
def captioned(tmp_path_factory):
    """One tar of 24 scenes with three captions each, and their truth."""
    drawn = [scene("test", i) for i in range(24)]
    captions = [draw_captions(one, 3) for one in drawn]
    texts = [{"captions": [caption.text for caption in row]} for row in captions]
    samples = [{"jpg": jpeg(one), "json": text} for one, text in zip(drawn, texts)]
    tar = write_samples(tmp_path_factory.mktemp("captioned") / "val.tar", samples)
    write_truth(tar.with_name("truth.npz"), [f"{i:03d}" for i in range(24)], drawn, captions)
    return tar


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """train (64 images in two shards), val (16) and classes (24), 32 pixels, five captions each."""
    return make_scenes(tmp_path_factory, train=64, val=16, classes_images=24, size=32, shard_size=32)


@pytest.fixture(scope="session")
def boxed_scenes(tmp_path_factory):
    """Eight images for validation, 48 pixels, with boxes, and the same as regions, entities and Visual Genome."""
    return make_scenes(tmp_path_factory, train=0, val=8, classes_images=0, size=48, captions=3, boxes=True)


@pytest.fixture(scope="session")
def composed_scenes(tmp_path_factory):
    """Pictures of several objects, and the combinations of these to ask for."""
    return make_scenes(tmp_path_factory, train=0, val=0, classes_images=0, size=32, compositions=1200, shard_size=600)


def make_scenes(tmp_path_factory, **plan):
    out = tmp_path_factory.mktemp("scenes") / "world"
    make(Plan(**plan), out, workers=1)
    return out


def picture(colour, size=16, format="PNG", mode="RGB", **options):
    """A picture of one colour, encoded."""
    return encode(Image.new(mode, (size, size) if isinstance(size, int) else size, colour), format, **options)


def shade(i):
    """A picture that says which one it is."""
    return picture((i % 256, i // 256 % 256, 0), (16, 12))


def which(image):
    """The number of a shade, below 65,536."""
    red, green, _ = image.getpixel((3, 3))
    return red + 256 * green


def save(path, content):
    """Write bytes, a text, or JSON to a path, whose folders are made; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_bytes(content))
    return path
