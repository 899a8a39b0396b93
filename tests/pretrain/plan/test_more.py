"""What the plan counts of patch dropout, masked copies, an average of the weights and the best checkpoint, against real
steps and real run folders."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pretrain import trainer
from pretrain.config import BUCKET, Config, Ema, Engine, Evaluate, Model
from pretrain.engine.average import Average
from pretrain.engine.engine import Towers, make_engine, start_deepspeed
from pretrain.folder import RunFolder
from pretrain.masking import draw_masks
from pretrain.objectives import ProLIP
from pretrain.plan import command as plan
from pretrain.plan import memory as plan_memory
from pretrain.plan import trace as plan_trace
from pretrain.plan.memory import FP32
from pretrain.plan.trace import Setting
from probemb.errors import UserError
from probemb.runs import checkpoints
from tests.pretrain.plan.test_plan import CPU, OPTIONS, a_real_backward_pass_first, inputs, make, measure_step
from tests.ranks import run_ranks

__all__ = ["a_real_backward_pass_first"]

COPIES = ProLIP.Options(masked_inclusion=1e-3)
PROLIP = Config(batch_size=64, objective="prolip", loss=COPIES, model=Model(name="ViT-Tiny-64", n_unc_layers=1))
HALF = replace(PROLIP, model=replace(PROLIP.model, patch_dropout=0.5))
DROPPED = replace(HALF, loss=ProLIP.Options())


def of(config, fake, world=1, **changes) -> Setting:
    return replace(Setting.of(config, world, fake.context_length, half=False, gpu=False), **changes)


def forward(config, real, rows):
    images, tokens = inputs(real, rows)
    masks = draw_masks(config, real, images, tokens, 0)
    return [images, tokens, *(m for m in masks if m is not None)], lambda: Towers(real, "fp32")(images, tokens, *masks)


@pytest.mark.parametrize("config", [PROLIP, HALF, DROPPED])
def test_flops_are_those_of_the_patches_and_tokens_that_are_read(config):
    real, fake, found, said = make(config), plan_trace.build(config), [], []
    for rows in (8, 16):
        with FlopCounterMode(display=False) as counter:
            sum(out.sum() for out in forward(config, real, rows)[1]() if out.requires_grad).backward()
        found.append(counter.get_total_flops())
        said.append(plan_trace.trace_part(fake, of(config, fake, rows=rows)).flops)
    assert said[1] - said[0] == pytest.approx(found[1] - found[0], rel=0.005)
    whole = replace(config, loss=ProLIP.Options(), model=replace(config.model, patch_dropout=0.0))
    without = [plan_trace.trace_part(fake, of(whole, fake, rows=rows)).flops for rows in (8, 16)]
    assert abs((without[1] - without[0]) / (found[1] - found[0]) - 1) > 0.02  # what is counted matters


@pytest.mark.parametrize("config", [PROLIP, HALF])
def test_activations_are_what_autograd_keeps_of_them(config):
    real, fake, rows = make(config), plan_trace.build(config), 16
    given, compute = forward(config, real, rows)
    known = {t.untyped_storage().data_ptr() for t in [*real.parameters(), *real.buffers(), *given]}
    kept = {}

    def pack(t):
        t = t.detach()  # an output that its own graph holds would never be freed
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = compute()
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert len(out) == 9
    s = of(config, fake, rows=rows)
    assert plan_trace.trace_part(fake, s).kept == pytest.approx(bytes_kept, rel=0.02)
    drawn = sum(t.nbytes for t in given[2:])
    assert plan_trace.input_bytes(fake, s) == (given[0].nbytes + given[1].nbytes, drawn)


@pytest.mark.parametrize(
    ("config", "world", "engine"),
    [
        (HALF, 1, {"zero_stage": 0}),
        (HALF, 2, {"zero_stage": 1}),
        pytest.param(HALF, 1, {"zero_stage": 2, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(PROLIP, 2, {"zero_stage": 0}, marks=pytest.mark.slow),
    ],
)
def test_a_real_step_needs_what_the_plan_says(config, world, engine):
    config = replace(config, ema=Ema(half_life_samples=1000), engine=Engine(**engine))
    fake = plan_trace.build(config)
    s = of(config, fake, world)
    said = plan_memory.memory(fake, s)
    bucket = FP32 * BUCKET if config.engine.zero_stage else 0
    for found in run_ranks(world, measure_step, config, timeout=400, fresh=True):
        for part in ("weights", "master", "moments", "average"):
            assert getattr(said, part) == pytest.approx(found[part], rel=1e-4), part
        assert said.average == pytest.approx(said.weights / (world if config.engine.zero_stage else 1), rel=1e-3)
        assert said.state + said.batch == pytest.approx(found["state"], rel=0.02)
        assert said.peak - bucket == pytest.approx(found["peak"] - bucket, rel=0.15)


def test_copies_need_rows_that_can_have_them():
    """What the run would refuse is planned with a batch that it takes; only parts that have copies are tried."""
    o = replace(OPTIONS, objective="prolip", loss=COPIES, gpus_per_node=1, batch_size=40)
    out = plan.make_plan(replace(o, gpus_per_node=2))
    assert out["run"]["rows_per_rank"] == 24
    assert "masked_inclusion" in out["warnings"][0]
    assert {v["accumulation"] for v in plan.make_plan(o)["memory"]["variants"]} == {1}
    assert {v["accumulation"] for v in plan.make_plan(replace(o, batch_size=64))["memory"]["variants"]} == {1, 2, 4, 8}
    with pytest.raises(UserError, match="multiple of that"):
        plan.make_plan(replace(o, batch_size=36))


def fill_a_folder(rank: int, world: int, config: Config) -> tuple[int, int, int]:
    """Bytes of the run folder's checkpoints and models at most, of a checkpoint, and of model/, of a run that saves
    every step and is best in the first and the last of five."""
    start_deepspeed()
    model, most = make(config), 0
    engine = make_engine(model, config, "fp32", CPU)
    average = Average(engine)
    fit = trainer.Trainer(engine, None, config, CPU, 10, average=average)
    folder = RunFolder(config, model, {}, steps=5, step=0, average=average)

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def look() -> None:
        nonlocal most
        most = max(most, sum(size(folder.path / name) for name in ("checkpoints", "model", "model-best")))

    flush, replace_path = checkpoints.flush, os.replace
    checkpoints.flush = lambda path: (look(), flush(path))[1]
    os.replace = lambda *paths: (look(), replace_path(*paths))[1]
    for step in range(1, 6):
        fit.train_step(*inputs(model, config.batch_size))
        if step in (1, 5):
            folder.report(step, {"validation_loss": 1 / step, "rsum": 0.0, **dict.fromkeys(WAYS, 0.0)})
            folder.keep_best(engine, step, step * config.batch_size)
        else:
            folder.save(engine, step, step * config.batch_size)
        folder.finish()
    assert {path.name for path in (folder.path / "checkpoints").iterdir()} == {"step-3", "step-5"}
    folder.close()
    return most, size(folder.path / "checkpoints" / "step-5"), size(folder.path / "model")


WAYS = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]


def test_a_run_folder_with_a_best_checkpoint_has_the_size_that_the_plan_says(tmp_path):
    evaluate = Evaluate(pairs="x", every_samples=8, best="validation_loss")
    model = Model(name="ViT-Micro-32", n_unc_layers=1, lock_image=True)
    config = Config(batch_size=8, model=model, evaluate=evaluate, ema=Ema(half_life_samples=100), out=str(tmp_path))
    config = replace(config, keep_checkpoints=1, save_every=1, keep_every=3)
    most, checkpoint, folder = run_ranks(1, fill_a_folder, config, timeout=300)[0]
    keys = ("model", "evaluate", "ema", "keep_checkpoints", "save_every", "keep_every")
    o = plan.Plan(**{key: getattr(config, key) for key in keys})
    said = plan.disk(o, plan_trace.build(config), steps=5)
    assert said["checkpoint"] == pytest.approx(checkpoint, rel=0.02)
    assert said["model_folder"] == pytest.approx(folder, rel=0.02)
    assert said["run_folder"] == pytest.approx(most, rel=0.02)
    assert said["kept"] == 3
