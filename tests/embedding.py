"""Four shards to embed, the embeddings that they should get, and the words of the command."""

import json
import multiprocessing
import os
import sys

import pytest

from probemb.cli.command import run_command
from probemb.data.scenes import scene
from probemb.data.shards.index import Shard, write_index
from probemb.search.embeddings import KINDS, open_embeddings
from tests.world import jpeg, write_tar
from tools.embed.command import main

PER_SHARD = 6


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Four shards of six scenes, with one to three captions each, and their index; the third has a sample without."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    rows = []
    for number in range(4):
        members = []
        for i in range(PER_SHARD):
            captions = [f"caption {number} {i} {j} {'word ' * 5 * j}" for j in range(1 + i % 3)]
            text = (".cls", b"3") if (number, i) == (2, 4) else (".txt", "\n".join(captions).encode())
            members += [(f"{number}{i}.jpg", jpeg(scene("embed", 10 * number + i))), (f"{number}{i}{text[0]}", text[1])]
        path = write_tar(folder / f"{number:05d}.tar", members)
        rows.append(Shard(path.name, path, PER_SHARD, path.stat().st_size))
    write_index(folder, rows)
    return folder


@pytest.fixture(scope="session")
def whole(corpus, run_folder, tmp_path_factory):
    """The corpus, embedded in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(options(run_folder, corpus, out)) == 0
    return out


def options(model, data, out, *more):
    return ["--model", str(model), "--data", str(data), "--out", str(out), "--batch-size", "4", *map(str, more)]


def items(folder):
    """How many there are of each kind that is complete."""
    embeddings = open_embeddings(folder)
    return {kind: count for kind in KINDS if (count := embeddings.count(kind)) is not None}


def contents(folder):
    """Every partition's bytes, and where each marker says that they come from."""
    found = {}
    for file in sorted(folder.rglob("*.*")):
        if file.suffix in (".npz", ".parquet"):
            found[str(file.relative_to(folder))] = file.read_bytes()
        elif file.name.endswith(".done.json"):
            found[str(file.relative_to(folder))] = json.loads(file.read_text())
    return found


def start(argv, prepare=lambda: None, **environ):
    """The command in a process forked from this one."""

    def work():
        os.setsid()
        os.environ.update(environ)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of the child
        prepare()
        run_command(lambda: main(argv))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process
