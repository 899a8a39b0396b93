"""Towers and scalars under DeepSpeed's ZeRO-3, which holds every parameter in pieces between uses."""

import pytest
import torch

from probemb.models import DualEncoder, create_model
from tests.ranks import run_ranks

STEPS = 3


def make(head, timm_model_name=None):
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32", head=head, embed_dim=16, grad_checkpointing=True)
    if timm_model_name:
        config = model.config
        config["architecture"]["vision_cfg"] = {
            "tower": "timm",
            "timm_model_name": timm_model_name,
            "timm_model_kwargs": {"img_size": 32} if "vit" in timm_model_name else {},
            "image_size": 32,
        }
        model = DualEncoder(config)
        model.set_grad_checkpointing()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def loss_of(out):
    similarity = out.logit_scale * (out.image.mean * out.text.mean).sum(-1)
    uncertainty = out.image.uncertainty() + out.text.uncertainty()
    return (out.scale * uncertainty - similarity + out.shift**2).mean()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 32, 32, generator=generator), torch.randint(1, 49408, (2, 16), generator=generator)


def train_sharded(rank, world, *tower):
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an optional kernel that would be compiled now
    deepspeed.init_distributed()
    model, optimizer = make(*tower)
    config = {
        "train_batch_size": 2 * world,
        # No parameter stays whole, not even the scalars; step 0 equals plain torch without the memory-saving linear.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed would clip to 1 by itself
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(engine(*batch()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tower", [("pie", "test_vit"), pytest.param(("gpo",), marks=pytest.mark.slow)])
def test_zero_3_equals_one_process(tower):
    model, optimizer = make(*tower)
    expected = []
    for _ in range(STEPS):
        loss = loss_of(model(*batch()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run_ranks(2, train_sharded, *tower):
        assert losses == pytest.approx(expected, rel=1e-4)
