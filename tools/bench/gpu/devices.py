"""Checks of devices: NCCL, placement, attention kernels, several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from probemb import distributed
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import TINY, Pool, configured, make_trainer, model_of, train, without_tf32

RANK_STEPS, RANK_ROWS = 3, 16
FUSED = ("flash", "cudnn", "efficient")  # parts of the names of attention that holds no scores


def placement(place: Place, notes: Notes) -> None:
    """The backend, its collectives, the device of everything that a step uses, and ranks against one process."""
    name = TINY if place.small else "ViT-B-32"
    trainer = make_trainer(configured(name, 8), "bf16" if place.gpu else "fp32", place.device)
    terms = train(trainer, Pool.of(model_of(trainer), 8, place.device), 2)
    expected = "nccl" if place.gpu else "gloo"
    notes.value("backend", dist.get_backend())
    if place.gpu:
        notes.value("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    notes.claim(f"the ranks' backend is {expected}", dist.get_backend() == expected)
    notes.claim("the collectives of a step work", collectives_work(place.device))
    state = [t for one in trainer.engine.optimizer.state.values() for t in one.values() if torch.is_tensor(t)]
    held = [*trainer.engine.module.parameters(), *trainer.engine.module.buffers(), *state]
    places = {str(t.device) for t in held}
    notes.value("tensors", {"number": len(held), "on": sorted(places)})
    notes.claim(f"weights, buffers and optimizer are on {place.device}", state and places == {str(place.device)})
    notes.claim("weights are float32", {p.dtype for p in trainer.engine.module.parameters()} == {torch.float32})
    notes.claim("losses are finite", all(map(torch.isfinite, torch.tensor(terms["loss"]))))
    ranks(place, notes)


def collectives_work(device: torch.device) -> bool:
    """Every collective that training uses, in the group of this process."""
    x = torch.arange(6.0, device=device).reshape(2, 3)
    gathered = distributed._Gather.apply(x.requires_grad_())  # what `gather` runs with more than one rank
    (gradient,) = torch.autograd.grad((gathered * gathered).sum(), x)
    whole = torch.ones(3, device=device)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    dist.reduce(whole, 0)
    objects: list = [None]
    dist.all_gather_object(objects, {"rank": 0})
    same = torch.equal(gathered, x) and torch.equal(gradient, 2 * x)
    return bool(same and whole.tolist() == [1, 1, 1] and objects == [{"rank": 0}])


def ranks(place: Place, notes: Notes) -> None:
    """Steps over several ranks against the same steps in one process."""
    world = 2 if not place.gpu else max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())
    if world == 1:
        notes.skip("several ranks", "there is one GPU, and NCCL takes one rank a GPU")
        return
    without_tf32()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run([*command, "-m", "tools.bench.gpu.ranks", str(out)], capture_output=True, text=True)
        if done.returncode:
            notes.claim(f"{world} ranks train: {done.stderr.strip().splitlines()[-1:]}", False)
            return
        found = json.loads(out.read_text())
    trainer = make_trainer(configured(TINY, RANK_ROWS), "fp32", place.device)
    alone = train(trainer, Pool.of(model_of(trainer), RANK_ROWS, place.device), RANK_STEPS)["loss"]
    difference = max(abs(a - b) / abs(b) for a, b in zip(found, alone))
    notes.value(f"{world} ranks differ from one by", difference)
    notes.claim(f"{world} ranks learn what one process learns", difference < 1e-4)


class Attention(TorchDispatchMode):
    """Counts the operators of scaled dot products."""

    def __init__(self):
        super().__init__()
        self.used: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if "attention" in name:
            self.used[name] += 1
        return func(*args, **(kwargs or {}))


def attention(place: Place, notes: Notes) -> None:
    """Check the attention kernels of both towers, forward and backward."""
    from pretrain.engine.engine import Towers
    from tools.bench.gpu.steps import make_model

    model = make_model(configured(TINY if place.small else "ViT-B-16", 8), place.device)
    images, tokens = next(Pool.of(model, 8, place.device).batches(1))
    towers = Towers(model, "bf16")
    for tower, given in (("image", {"images": images}), ("text", {"tokens": tokens})):
        with Attention() as counter:
            out = towers(**given)
            sum(one.float().square().sum() for one in out).backward()
        notes.value(f"{tower} tower", dict(counter.used))
        fused = bool(counter.used) and all(any(part in name for part in FUSED) for name in counter.used)
        notes.claim(f"the {tower} tower's attention is fused, forward and backward", fused)
        if tower == "image":
            flash = any("flash" in name or "cudnn" in name for name in counter.used)
            notes.claim("the image tower's attention is a flash kernel", flash)
