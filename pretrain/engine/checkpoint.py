"""Checkpoints that any ZeRO stage and any number of ranks can load; no pickles.

    checkpoints/step-N/
        weights.safetensors     NAME: parameters (float32) and buffers of the engine's module, whole
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME: Adam's moments (float32), whole; average.NAME: the
                                average of the weights, in runs that keep one
        random.safetensors      RANK.torch, RANK.cuda: random state of every rank
        state.json              everything else: the caller's state, step counts, sizes and SHA-256 of the files

A checkpoint appears under its name only when it is complete and on disk, in a folder that all ranks share.
Resuming at the same stage and number of ranks is exact to the bit on a CPU; otherwise only the order of sums differs.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pretrain.engine.state import MOMENTS, Average, EngineState
from probemb import distributed
from probemb.distributed import agree, all_of
from probemb.errors import UserError
from probemb.runs.checkpoints import OPTIMIZER, RANDOM, WEIGHTS, Damaged, Snapshot, read_content

AVERAGE = "average."  # before a parameter's name


def take_snapshot(engine, step: int, state: dict[str, Any], average: Average | None = None) -> Snapshot | None:
    """Copy the training state to rank 0's memory (12 bytes a parameter, 4 more with an average), and the caller's own
    `state`, which JSON can hold; collective, between two optimizer steps. None on the other ranks."""
    held = EngineState(engine)
    weights, moments, steps = held.weights(), held.moments(), held.steps()
    means, generators = average.whole() if average else {}, all_of(random_state())
    if not distributed.is_main():
        return None
    content = {"step": step, "adam_steps": steps, "state": state}
    moments |= {f"{AVERAGE}{name}": mean for name, mean in means.items()}
    random = {f"{rank}.{name}": t for rank, own in enumerate(generators) for name, t in own.items()}
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments, RANDOM: random}, content, weights | means)


def load_checkpoint(engine, path: Path, average: Average | None = None) -> None:
    """Restore an engine from a checkpoint that `find_checkpoint` has verified; collective, between two steps.

    An average begins with the weights if the checkpoint has none; a rank that it does not have gets random states drawn
    from rank 0's and its own number. Raises UserError: damaged, or of another model; on all ranks, and nothing is
    changed."""
    held = EngineState(engine)
    with ExitStack() as stack:
        failure = None
        try:
            content = read_content(path)
            weights, moments = (stack.enter_context(safe_open(path / name, "pt")) for name in (WEIGHTS, OPTIMIZER))
            stored, shapes = _shapes_in(weights) | _shapes_in(moments), held.shapes()
            averaged = any(name.startswith(AVERAGE) for name in stored)
            kinds = [f"{moment}." for moment in MOMENTS] + [AVERAGE] * averaged
            _check_shapes(path, shapes | {f"{kind}{n}": shapes[n] for n in held.stepped for kind in kinds}, stored)
            generators = _own_random_state(load_file(path / RANDOM))
        except UserError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = Damaged(path, str(error))
        agree(failure)
        held.load(weights.get_tensor, moments.get_tensor, content["adam_steps"])
        if average:
            average.load(lambda name: moments.get_tensor(f"{AVERAGE}{name}") if averaged else weights.get_tensor(name))
    set_random_state(generators)


def read_exported(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's module as they are exported: their average, if it has one. Raises Damaged."""
    try:
        weights = load_file(path / WEIGHTS)
        with safe_open(path / OPTIMIZER, "pt") as moments:
            means = [name for name in _shapes_in(moments) if name.startswith(AVERAGE)]
            return weights | {name.removeprefix(AVERAGE): moments.get_tensor(name) for name in means}
    except (OSError, SafetensorError) as error:
        raise Damaged(path, str(error)) from error


def _shapes_in(file) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def _check_shapes(path: Path, ours: dict[str, tuple], stored: dict[str, tuple]) -> None:
    """Compare names and shapes of the engine with those in a file. Raises UserError."""
    if found := [name for name in ours | stored if ours.get(name) != stored.get(name)]:
        first = f"{found[0]!r} is {stored.get(found[0], 'missing')} instead of {ours.get(found[0], 'unknown')}"
        what = f"The checkpoint {path} is a checkpoint of another model: {first}, and {len(found) - 1} more."
        raise UserError(what, "Resume with the model of the run (config.yaml in its folder), or start a new run.")


def random_state() -> dict[str, Tensor]:
    """This process' generators that training draws from: torch's on the CPU and on its GPU."""
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"torch": torch.get_rng_state(), **gpu}


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore a result of `random_state`, without the GPU's part if there is no GPU."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _own_random_state(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of {"RANK.GENERATOR": tensor}; for a further rank, one drawn from rank 0's and its number."""
    rank, own = distributed.rank(), f"{distributed.rank()}."
    if f"{own}torch" in stored:
        return {name.removeprefix(own): state for name, state in stored.items() if name.startswith(own)}
    digest = hashlib.sha256(bytes(stored["0.torch"].tolist()) + rank.to_bytes(8, "little")).digest()
    seed, gpu = int.from_bytes(digest[:4], "little"), {"cuda": "cuda"} if torch.cuda.is_available() else {}
    return {name: torch.Generator(on).manual_seed(seed).get_state() for name, on in ({"torch": "cpu"} | gpu).items()}
