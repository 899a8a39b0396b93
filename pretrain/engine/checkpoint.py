"""Checkpoints that any ZeRO stage and any number of ranks can load; no pickles.

    checkpoints/step-N/
        weights.safetensors     NAME: parameters (float32) and buffers of the engine's module, whole
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME: Adam's moments (float32), whole; average.NAME: the
                                average of the weights, in runs that keep one
        random.safetensors      RANK.GENERATOR: random state of every rank
        state.json              everything else: the caller's state, step counts, sizes and SHA-256 of the files

A checkpoint appears under its name only when it is complete and on disk, in a folder that all ranks share.
Resuming at the same stage and number of ranks is exact to the bit on a CPU; otherwise only the order of sums differs.

`take_snapshot` copies the state to rank 0's memory, between steps; `Snapshot.write` can run in a thread while training
continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pretrain.engine.average import Average
from pretrain.engine.randomness import choose_random_state, random_state, set_random_state
from pretrain.engine.state import MOMENTS, EngineState, full_state_dict, shapes
from probemb import distributed
from probemb.distributed import agree, all_of
from probemb.errors import UserError
from probemb.runs.checkpoints import (
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    Damaged,
    Snapshot,
    read_content,
    verify_files,
)

AVERAGE = "average."  # before a parameter's name
COUNTERS = "global_steps", "global_samples"  # of the engine


def take_snapshot(engine, step: int, state: dict[str, Any], average: Average | None = None) -> Snapshot | None:
    """Copy the training state to rank 0's memory (12 bytes a parameter, 4 more with an average); collective, between
    two optimizer steps.

    Args:
        state: the caller's own, returned by `load_checkpoint`; JSON, the same on all ranks.
        average: of the engine's weights; it takes their place in `Snapshot.whole`.

    Returns:
        None on the other ranks.
    """
    json.dumps(state, allow_nan=False)  # raises on every rank before the first collective
    held = EngineState(engine)
    whole, moments, steps = full_state_dict(engine), held.moments(), held.steps()
    means = average.whole() if average else {}
    generators = all_of(random_state())
    if not distributed.is_main():
        return None
    content = {
        "step": step,
        "world_size": distributed.world_size(),
        "zero_stage": held.stage,
        "engine": {name: getattr(engine, name) for name in COUNTERS},
        "adam_steps": steps,
        "groups": [
            {"lr": float(g["lr"]), **{key: g[key] for key in ("betas", "eps", "weight_decay")}}
            for g in held.optimizer.param_groups
        ],
        "state": state,
    }
    rng = {f"{r}.{name}": t for r, one in enumerate(generators) for name, t in one.items()}
    # Each parameter is stored once, under its first name.
    weights = {name: whole[name] for name in shapes(engine)}
    moments |= {f"{AVERAGE}{name}": mean for name, mean in means.items()}
    mean_of = {id(whole[name]): mean for name, mean in means.items()}  # of each of a shared parameter's names
    averaged = {name: mean_of.get(id(tensor), tensor) for name, tensor in whole.items()}
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments, RANDOM: rng}, content, averaged)


def load_checkpoint(engine, path: Path | str, verified: bool = False, average: Average | None = None) -> dict[str, Any]:
    """Restore an engine from a snapshot; collective, between two steps.

    Restores weights, buffers, Adam's moments and counts, learning rates, the engine's counters, and random states.
    Betas, eps and weight decay are configuration. A rank that the checkpoint does not have gets random states drawn
    from rank 0's and its own number.

    Args:
        verified: the files' sums have already been checked.
        average: is restored too; it begins with the weights if the checkpoint has none.

    Returns:
        what `read_state` returns.

    Raises:
        UserError: damaged, of another version, or of another model; on all ranks, and nothing is changed.
    """
    path = Path(path)
    held = EngineState(engine)
    with ExitStack() as stack:
        failure = content = None
        try:
            content = read_content(path)
            if distributed.is_main() and not verified:
                verify_files(path, content)
            weights, moments = (stack.enter_context(_open(path, name)) for name in (WEIGHTS, OPTIMIZER))
            ours = shapes(engine)
            _check_shapes(path, ours, _shapes_in(weights))
            theirs = _shapes_in(moments)
            averaged = any(name.startswith(AVERAGE) for name in theirs)
            kinds = [f"{moment}." for moment in MOMENTS] + [AVERAGE] * averaged
            _check_shapes(path, {f"{kind}{name}": ours[name] for name in held.stepped for kind in kinds}, theirs)
            steps = {name: int(content["adam_steps"][name]) for name in held.stepped}
            rates = [float(group["lr"]) for group in content["groups"]]
            if len(rates) != len(held.optimizer.param_groups):
                raise _another_model(path, [f"it has {len(rates)} parameter groups"])
            counters = {name: int(content["engine"][name]) for name in COUNTERS}
            generators = choose_random_state(load_file(path / RANDOM), int(content["world_size"]))
        except UserError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = Damaged(path, str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            failure = Damaged(path, f"{STATE} is not as it was written ({error!r})")
        agree(failure)

        held.load(weights.get_tensor, moments.get_tensor, steps)
        if average and averaged:
            average.load(lambda name: moments.get_tensor(f"{AVERAGE}{name}"))
        elif average:
            average.restart()
    for group, rate in zip(held.optimizer.param_groups, rates):
        group["lr"] = rate
    for name, value in counters.items():
        setattr(engine, name, value)
    set_random_state(generators)
    distributed.barrier()
    return {**content["state"], "step": content["step"]}


def read_exported(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's module as they are exported: their average, if it has one. Raises Damaged."""
    try:
        with _open(path, WEIGHTS) as live, _open(path, OPTIMIZER) as moments:
            averaged = {name for name in moments.keys() if name.startswith(AVERAGE)}  # noqa: SIM118 - not a dict
            return {
                name: moments.get_tensor(mean) if (mean := f"{AVERAGE}{name}") in averaged else live.get_tensor(name)
                for name in live.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise Damaged(path, str(error)) from error


def _open(path: Path, name: str):
    return safe_open(path / name, framework="pt", device="cpu")


def _shapes_in(file) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def _check_shapes(path: Path, ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> None:
    """Names and shapes of the engine against those in a file."""

    def differences() -> Iterator[str]:
        for name, shape in ours.items():
            if name not in theirs:
                yield f"{name!r} is missing"
            elif theirs[name] != shape:
                yield f"{name!r} is {theirs[name]} instead of {shape}"
        yield from (f"{name[:100]!r} is unknown" for name in theirs if name not in ours)

    found = list(differences())
    if found:
        raise _another_model(path, found)


def _another_model(path: Path, differences: list[str]) -> UserError:
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return UserError(
        f"The checkpoint {path} is a checkpoint of another model: {', '.join(differences[:3])}{more}.",
        "Resume with the model that the run was started with (config.yaml in its folder), or start a new run.",
    )
