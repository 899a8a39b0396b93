"""Whole commands: pretraining that resumes, finetuning under accelerate, embedding and search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench.gpu.notes import Notes, Place, Skip
from tools.bench.gpu.running import ROOT

FAISS = 1e-3  # by which its distances may differ, as a share of the largest
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STATE = ("weights.safetensors", "optimizer.safetensors")


def run(*words: object) -> str:
    """Run a command of the project in a process group of its own; returns what it printed.

    Raises RuntimeError with the end of that.
    """
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env=alone, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{words[1]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def draw_scenes(folder: Path, small: bool, **more) -> Path:
    """A small synthetic world."""
    from tools.make_scenes import Plan, make

    size = {"train": 64, "val": 16, "size": 32} if small else {"train": 512, "val": 128, "size": 64}
    make(Plan(classes_images=0, shard_size=64, **{**size, **more}), folder / "world", workers=1)
    return folder / "world"


def lines_of(run_folder: Path) -> list[dict]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def exact_resume(place: Place, notes: Notes) -> None:
    """A pretraining that is stopped and resumed ends with the bits of one that is not, in deterministic mode."""
    name, batch = ("ViT-Micro-32", 16) if place.small else ("ViT-Tiny-64", 64)
    with tempfile.TemporaryDirectory() as folder:
        world = draw_scenes(Path(folder), place.small)
        words = ["-m", "pretrain.run", "--data.train", world / "train", "--model.name", name, "--batch-size", batch]
        words += ["--samples", 8 * batch, "--log-every", 1, "--save-every", 0, "--data.workers", 1]
        words += ["--optimizer.warmup_samples", batch, "--engine.deterministic", "true", "--engine.threads", 1]
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        notes.value("engine", next(x for x in run(*words, "--out", whole).splitlines() if "DeepSpeed" in x).strip())
        run(*words, "--out", parts, "--stop-at-step", 4)
        notes.value("samples at the stop", lines_of(parts)[-1]["samples"])
        run(*words, "--out", parts, "--resume")
        files = [[(one / "checkpoints" / "step-8" / file).read_bytes() for file in STATE] for one in (whole, parts)]
        losses = [[line["loss"] for line in lines_of(one)] for one in (whole, parts)]
        notes.value("losses", [losses[0][0], losses[0][-1]])
        notes.claim("a resumed run's log is that of one without a stop", losses[0] == losses[1] and len(losses[0]) == 8)
        notes.claim("weights and Adam's moments are the same to the bit", files[0] == files[1])


def finetuning(place: Place, notes: Notes) -> None:
    """accelerate launch finetune/run.py: the loss falls, on the device and in the precision that it says."""
    name, batch, epochs = ("ViT-Micro-32", 16, 2) if place.small else ("ViT-Tiny-64", 64, 4)
    with tempfile.TemporaryDirectory() as folder:
        world, out = draw_scenes(Path(folder), place.small), Path(folder) / "run"
        words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "finetune" / "accelerate.yaml"]
        words += [ROOT / "finetune" / "run.py", "--method", "pcmepp", "--no-model.pretrained", "--model.name", name]
        words += ["--model.head", "clip", "--data.path", world, "--data.workers", 0 if place.small else 4]
        words += ["--size_augment", 0, "--mix.ratio", 0, "--batch-size", batch, "--epochs", epochs, "--swa-epochs", 0]
        words += ["--log-every", 1, "--optimizer.freeze-epochs", 0, "--optimizer.decay-epochs", 0]
        words += ["--optimizer.warmup-epochs", 0, "--out", out, "--engine.threads", 1]
        said = next(line for line in run(*words).splitlines() if " x " in line and "batch" in line)
        losses = [line["loss"] for line in lines_of(out) if "loss" in line]
        steps = len(losses) // epochs
        notes.value("engine", said.strip())
        notes.value("loss of the first and the last epoch", [sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps])
        notes.claim(f"it runs on {place.device.type}", f" x {place.device.type}" in said)
        notes.claim("the loss falls", sum(losses[-steps:]) < sum(losses[:steps]))


def search_on_the_gpu(place: Place, notes: Notes) -> None:
    """tools.embed, tools.build_index and the search on the GPU give what exact CSD on the CPU gives."""
    try:
        import faiss
    except ImportError as error:
        raise Skip("faiss is not installed") from error
    import torch

    from probemb.distances import csd
    from probemb.models import create_model, save_model
    from probemb.search import load_index, search
    from probemb.search.embeddings import open_embeddings

    name = "ViT-Micro-32" if place.small else "ViT-Tiny-64"
    with tempfile.TemporaryDirectory() as folder:
        world, model = draw_scenes(Path(folder), place.small) / "train", Path(folder) / "model"
        torch.manual_seed(0)
        save_model(create_model(name), model)
        embeddings, where = Path(folder) / "embeddings", place.device.type
        words = ["--model", model, "--data", world, "--items", "image", "--device", where]
        run("-m", "tools.embed", *words, "--out", embeddings)
        gallery = read_gallery(open_embeddings(embeddings))
        queries = gallery[:32]
        expected = csd(queries, gallery).topk(10, largest=False).values
        for factory, more in {"Flat": [], "IVF2,Flat": ["--effort", 2, "--device", where]}.items():
            index = Path(folder) / factory.replace(",", "-")
            run("-m", "tools.build_index", "--embeddings", embeddings, "--out", index, "--factory", factory, *more)
            for device in ("cpu", "cuda"):
                if device == "cuda" and not (place.gpu and getattr(faiss, "get_num_gpus", lambda: 0)()):
                    notes.skip(f"{factory} on a GPU", "FAISS sees none")
                    continue
                distance, _ = search(load_index(index, device=device), queries, 10)
                off = float((distance - expected).abs().max() / expected.max())
                notes.value(f"{factory} on {device}: distances differ by", off)
                notes.claim(f"{factory} on {device} finds the exact neighbours", off < FAISS)


def read_gallery(embeddings):
    """All images, Gaussian (N, D), with their uncertainty spread evenly over the dimensions."""
    import numpy as np
    import torch

    from probemb.gaussian import Gaussian

    mean, u = (np.concatenate(x) for x in zip(*(embeddings.read(one) for one in embeddings.partitions("image"))))
    mean, u = torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(u)
    return Gaussian(mean, (u / embeddings.dim).log()[:, None].expand_as(mean))
