"""Checkpoints of real engines over real ranks: exact resume, damage, refusals."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.config import Engine
from pretrain.engine import checkpoint, zero
from pretrain.engine.engine import make_engine as engine_around
from probemb import distributed
from probemb.distributed import agree, init_process_group
from probemb.errors import UserError
from probemb.runs import checkpoints
from probemb.runs.checkpoints import find_checkpoint, read_state
from tests.ranks import run_ranks
from tests.steps import snapshot

BATCH = 12  # for 1, 2 and 3 ranks

STATE = {"samples": 36, "config": {"lr": 1e-2}, "by_number": {9: "a", 10: "b"}}


def save_checkpoint(engine, run_dir: Path, step: int, state: dict) -> Path:
    """`take_snapshot` and `Snapshot.write` at once; collective. Raises OSError on all ranks."""
    snapshot, failure = checkpoint.take_snapshot(engine, step, state), None
    if snapshot:
        try:
            snapshot.write(run_dir)
        except OSError as error:
            failure = error
    agree(failure)
    return run_dir / "checkpoints" / f"step-{step}"


class Net(nn.Module):
    """Odd sizes, so that no number of ranks divides them; a frozen parameter, and buffers."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.first = nn.Linear(7, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, 3)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("derived", torch.ones(2), persistent=False)

    def forward(self, x):
        self.calls += 1
        x = self.last(self.drop(torch.tanh(self.norm(self.first(x))))) * self.frozen
        return (x + self.shift) * self.scale


def make_engine(stage, world, hidden=5, dropout=0.0, seed=0, persistent=0):
    init_process_group()
    torch.manual_seed(seed)
    zero.PERSISTENT = persistent
    module = Net(hidden, dropout)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, fused=True)
    return engine_around(module, optimizer, Engine(zero_stage=stage), BATCH, torch.device("cpu"))


def train(engine, rank, world, steps):
    n = BATCH // world
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 7, generator=g), torch.randn(BATCH, 3, generator=g)
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        loss = (engine(x[rank * n : (rank + 1) * n]) - y[rank * n : (rank + 1) * n]).square().mean()
        engine.backward(loss)
        norm = distributed.sum_over_ranks([engine.gradient_norm().square()])[0].sqrt()
        engine.step(torch.tensor(False), norm, 0.3)


def assert_same(a, b, tolerance=0.0):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=tolerance, err_msg=name)


def save_and_resume(rank, world, stage, persistent, folder):
    engine = make_engine(stage, world, dropout=0.2, persistent=persistent)  # dropout: the random state matters too
    torch.manual_seed(100 + rank)
    train(engine, rank, world, range(3))
    path = save_checkpoint(engine, folder, 3, STATE)
    saved = snapshot(engine)
    train(engine, rank, world, range(3, 6))
    straight = snapshot(engine)

    fresh = make_engine(stage, world, dropout=0.2, seed=1, persistent=persistent)
    if stage == 0 or persistent:
        train(fresh, rank, world, range(2))  # loading over an engine that has already stepped
    checkpoint.load_checkpoint(fresh, path)
    loaded = snapshot(fresh)
    train(fresh, rank, world, range(3, 6))
    return saved, loaded, straight, snapshot(fresh), read_state(path)


@pytest.mark.parametrize(
    ("stage", "persistent", "world"),
    [
        (0, 0, 3),
        (1, 0, 2),
        (3, 0, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0, 3), (3, 1000, 2))),
    ],
)
def test_resuming_at_the_same_stage_and_ranks_is_exact(stage, persistent, world, tmp_path):
    results = run_ranks(world, save_and_resume, stage, persistent, tmp_path)
    saved, loaded, straight, resumed, *_ = results[0]
    assert_same(saved, loaded)
    assert_same(straight, resumed)
    assert np.abs(straight["last.weight"] - saved["last.weight"]).max() > 1e-4
    assert np.abs(saved["exp_avg_sq.last.weight"]).max() > 0
    assert saved["step.scale"] == 3
    assert saved["calls"] == 3
    assert "derived" not in saved
    for *_, state in results:
        assert state == {**STATE, "by_number": {"9": "a", "10": "b"}, "step": 3}


def kill_during_writes(rank, world, folder):
    """Save step 3, then try step 6 in children that are killed at each of the points where a write reaches the disk."""
    engine = make_engine(0, 1)
    save_checkpoint(engine, folder, 3, {})
    flush, newest, leftovers = checkpoints.flush, [], []
    for fatal in range(1, 7):
        child = os.fork()
        if child == 0:
            flushed = []

            def dying_flush(path, flushed=flushed, fatal=fatal):
                flush(path)
                flushed.append(path)
                if len(flushed) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)

            checkpoints.flush = dying_flush
            save_checkpoint(engine, folder, 6, {})
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        newest.append(find_checkpoint(folder).name)
        leftovers.append(sorted(p.name for p in (folder / "checkpoints").glob(".*")))
    train(engine, rank, world, range(1))
    save_checkpoint(engine, folder, 6, {"again": True})
    path = find_checkpoint(folder)
    checkpoint.load_checkpoint(engine, path)
    return newest, leftovers, read_state(path), sorted(p.name for p in path.parent.iterdir())


def test_a_killed_write_leaves_the_checkpoint_before(tmp_path):
    ((newest, leftovers, state, names),) = run_ranks(1, kill_during_writes, tmp_path)
    assert newest == ["step-3"] * 5 + ["step-6"]
    assert leftovers == [[".step-6.partial"]] * 5 + [[]]
    assert state == {"again": True, "step": 6}
    assert names == ["step-3", "step-6"]


def refuse(rank, world, folder):
    """All the ways in which a checkpoint can be wrong: the message of each, and whether anything changed."""
    engine = make_engine(1, world)
    train(engine, rank, world, range(2))
    good = save_checkpoint(engine, folder, 3, {})
    other = save_checkpoint(make_engine(3, world, hidden=6), folder / "other", 3, {})
    if rank == 0:
        spoil(good, folder)
    torch.distributed.barrier()

    train(engine, rank, world, range(2, 4))
    before, draws = snapshot(engine), torch.get_rng_state()
    messages = {}
    for path in [other, *(folder / name for name in SPOILED)]:
        with pytest.raises(UserError) as error:
            checkpoint.load_checkpoint(engine, path)
        messages[path.name] = error.value.what
    assert_same(before, snapshot(engine))
    assert torch.equal(draws, torch.get_rng_state())
    return messages


SPOILED = ("cut", "changed")


def spoil(good, folder):
    for name in SPOILED:
        shutil.copytree(good, folder / name)
    os.truncate(folder / "cut" / "weights.safetensors", 100)
    text = (good / "state.json").read_text()
    (folder / "changed" / "state.json").write_text(text.replace('"step": 3', '"step": 4'))


def test_damaged_files_and_other_models_are_refused_and_nothing_changes(tmp_path):
    first, second = run_ranks(2, refuse, tmp_path)
    assert first == second
    assert "another model: 'first.weight' is (6, 7) instead of (5, 7)" in first["step-3"]
    assert "and 14 more" in first["step-3"]
    assert "weights.safetensors has 100 bytes" in first["cut"]
    assert "state.json has been changed" in first["changed"]
