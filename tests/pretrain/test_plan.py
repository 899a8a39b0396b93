"""The plan's parameters, activations, FLOPs, hours and disk against the real model and run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pretrain import plan
from pretrain.config import Config, Engine, Model
from pretrain.cost import StepCost
from probemb.data.shards.index import Shard, write_index
from probemb.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Config(batch_size=16, model=Model(name="ViT-Micro-32", n_unc_layers=1))


@pytest.fixture(scope="module")
def models():
    """One real and one planned."""
    torch.manual_seed(0)
    return CONFIG.create_model(), StepCost(CONFIG, 1, half=False)


def inputs(model, rows):
    tokens = torch.randint(1, 1000, (rows, model.context_length))
    tokens[:, -1] = 49407  # end of text
    return torch.randint(256, (rows, 3, model.image_size, model.image_size), dtype=torch.uint8), tokens


def test_parameters_are_the_real_model_s(models):
    real, fake = models[0], models[1].model
    assert {n: p.shape for n, p in fake.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    counts = plan.count_parameters(fake)
    assert counts.pop("total") == sum(counts.values()) == sum(p.numel() for p in real.parameters())
    blocks = real.visual.uncertainty_transformer
    assert counts["image uncertainty branch"] == sum(p.numel() for p in blocks.parameters())


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_what_autograd_keeps(models, half):
    real, _ = models
    images, tokens = inputs(real, 16)
    known = {t.untyped_storage().data_ptr() for t in [*real.parameters(), *real.buffers(), images, tokens]}
    kept = {}

    def pack(t):
        t = t.detach()  # an output that its own graph holds would never be freed
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t  # alive, so that no other tensor gets its address
        return t

    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=half):
        out = real(images, tokens)  # lives until the hooks are gone
    assert out.image.mean.requires_grad
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    planned = StepCost(CONFIG, 1, half).kept
    assert planned == pytest.approx(bytes_kept, rel=0.05)
    checkpointing = replace(CONFIG, engine=Engine(grad_checkpointing=True))
    assert StepCost(checkpointing, 1, half).kept < 0.3 * planned


def test_flops_are_those_that_torch_counts(models):
    real, cost = models
    with FlopCounterMode(display=False) as counter:
        out = real(*inputs(real, 16))
        sum(t.sum() for g in (out.image, out.text) for t in (g.mean, g.log_var)).backward()
    assert cost.step_flops == cost.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    again = StepCost(replace(CONFIG, engine=Engine(accumulation=2, grad_checkpointing=True)), 1, False)
    assert again.step_flops > 1.5 * cost.step_flops
    assert StepCost(replace(CONFIG, batch_size=64), 4, False).step_flops == 4 * cost.step_flops


def test_zero_shares_out_what_it_says():
    cost = StepCost(CONFIG, 4, half=False)
    p = 4 * sum(q.numel() for q in cost.model.parameters())
    found = [cost.memory(stage) for stage in range(4)]
    assert [m["weights"] for m in found[:3]] == [p] * 3
    assert found[3]["weights"] == pytest.approx(p / 4, rel=0.01)
    assert [round(m["moments"] / p, 2) for m in found] == [2.0, 0.5, 0.5, 0.5]
    assert [round(m["gradients"] / p, 2) for m in found] == [1.0, 0.25, 0.25, 0.25]


OPTIONS = plan.Plan(
    model=Model(name="ViT-Micro-32"),
    engine=Engine(precision="bf16"),
    batch_size=64,
    epochs=2,
    samples_per_epoch=1000,
    gpus_per_node=4,
)


def test_hours_follow_from_a_measured_speed_or_a_peak():
    out = plan.make_plan(replace(OPTIONS, images_per_second=200.0))
    assert out["run"]["steps"] == 2 * (1000 // 64)
    assert out["compute"]["hours"] == pytest.approx(30 * 64 / 200 / 3600)
    computed = plan.make_plan(replace(OPTIONS, peak_tflops=312.0, efficiency=0.5))["compute"]
    assert computed["images_per_second"] == pytest.approx(4 * 156e12 * 64 / computed["flops_per_step"])
    named = plan.make_plan(replace(OPTIONS, gpu="a100", efficiency=0.5))["compute"]
    assert named["hours"] == computed["hours"]


def test_samples_come_from_the_index_where_it_is(tmp_path):
    for name, samples in (("a", 300), ("b", 100)):
        (tmp_path / name).mkdir()
        shard = tmp_path / name / "0.tar"
        shard.write_bytes(bytes(samples * 2000))
        write_index(shard.parent, [Shard("0.tar", shard, samples, samples * 2000)])
    data = replace(OPTIONS.data, train=[str(tmp_path / "a"), str(tmp_path / "b")], weights=[1.0, 2.5])
    o = replace(OPTIONS, data=data, samples_per_epoch=0, images_per_second=100.0)
    out = plan.make_plan(o)
    assert out["run"]["samples_per_epoch"] == 550
    assert out["compute"]["bytes_per_second"] == pytest.approx(200_000)
    with pytest.raises(UserError, match="--samples-per-epoch"):
        plan.make_plan(replace(o, data=replace(data, train=str(tmp_path / "c"), weights=None)))


def test_what_would_fail_is_told():
    with pytest.raises(UserError, match="Set batch_size to 64 or 68"):
        plan.make_plan(replace(OPTIONS, batch_size=66))
    assert plan.make_plan(OPTIONS)["warnings"] == []
    out = plan.make_plan(replace(OPTIONS, gpu_memory_gib=0.3, engine=Engine(zero_stage=1, precision="bf16")))
    assert out["run"]["recommended_zero_stage"] == 0
    assert "more than the 307.2 MiB of a GPU. It would fit with ZeRO 0" in out["warnings"][0]
