"""A tiny model and a small labelled and captioned piece of the synthetic world, made once."""

import io
import json
import tarfile

import pytest
import torch

from probemb.data.scenes import class_names, class_scene, draw_captions, render, sample_to_json, scene

N_CLASSES, PER_CLASS = 8, 4


def jpeg(one, size=32):
    data = io.BytesIO()
    render(one, size).save(data, "JPEG", quality=90)
    return data.getvalue()


def write_tar(path, files):
    """files: (name, bytes) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture(scope="session")
def pictures():
    """(label, JPEG) of 8 classes x 4 images."""
    return [(i % N_CLASSES, jpeg(class_scene("test", 64 * i + i % N_CLASSES))) for i in range(N_CLASSES * PER_CLASS)]


@pytest.fixture(scope="session")
def names():
    return class_names()[:N_CLASSES]


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
        members = []
        for i, (label, data) in enumerate(part):
            members += [(f"{i:03d}.jpg", data), (f"{i:03d}.cls", str(label).encode())]
        write_tar(folder / f"{number:05d}.tar", members)
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    return folder


@pytest.fixture(scope="session")
def captioned(tmp_path_factory):
    """One tar of 24 scenes with three captions each."""
    members = []
    for i in range(24):
        one = scene("test", i)
        row = sample_to_json(one, draw_captions(one, 3))
        members += [(f"{i:03d}.jpg", jpeg(one)), (f"{i:03d}.json", json.dumps(row).encode())]
    return write_tar(tmp_path_factory.mktemp("captioned") / "val.tar", members)
