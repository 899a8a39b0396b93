"""The DeepSpeed engine around the towers: quiet import, process group, optimizer and ZeRO settings."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings

import torch
from torch import Tensor, nn

from pretrain.config import BUCKET, Config, Optimizer
from pretrain.engine.state import leave_norms
from probemb import distributed
from probemb.models import DualEncoder, no_weight_decay
from probemb.models.layers import layer_rates


class Towers(nn.Module):
    """The module that the engine wraps: the model with flat tensors in and out, which every ZeRO stage can hook."""

    def __init__(self, model: DualEncoder, precision: str):
        super().__init__()
        self.model = model
        self.half = precision == "bf16"

    def forward(
        self,
        images: Tensor | None = None,
        tokens: Tensor | None = None,
        kept: Tensor | None = None,
        masked_image: Tensor | None = None,
        masked_text: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Means and log-variances of the given inputs, (B, D) each; with both also `ModelOutput`'s scalars, (3,), and
        before these the means and log-variances of the masked copies that `masking.Masks` asks for."""
        given = images if images is not None else tokens
        with torch.autocast(given.device.type, dtype=torch.bfloat16, enabled=self.half):
            if images is None or tokens is None:
                g = self.model.encode_text(tokens) if images is None else self.model.encode_image(images)
                return g.mean, g.log_var
            out, masked = self.model(images, tokens, kept), ()
            if masked_image is not None:
                every = len(images) // len(masked_image)
                image = self.model.encode_image(images[::every], kept=masked_image)
                text = self.model.encode_text(tokens[::every], kept=masked_text)
                masked = image.mean, image.log_var, text.mean, text.log_var
        scalars = torch.cat([out.logit_scale, out.scale, out.shift])
        return out.image.mean, out.image.log_var, out.text.mean, out.text.log_var, *masked, scalars


def make_engine(
    model: DualEncoder,
    config: Config,
    precision: str,
    device: torch.device,
    persistent_elements: int = 100_000,
):
    """A DeepSpeed engine around `Towers(model)`; collective. Call `start_deepspeed` before.

    `persistent_elements`: ZeRO-3 leaves parameters up to this size whole on every rank.
    """
    import deepspeed

    o, e = config.optimizer, config.engine
    optimizer = torch.optim.AdamW(
        parameter_groups(model, o),
        lr=o.lr,
        betas=tuple(o.betas),
        eps=o.eps,
        fused=True,
    )
    world = distributed.world_size()
    settings = {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.batch_size // world // e.accumulation,
        "gradient_accumulation_steps": e.accumulation,
        "gradient_clipping": 0.0,  # `step_unless` clips
        "zero_optimization": {
            "stage": e.zero_stage,
            "overlap_comm": device.type == "cuda" and world > 1,  # the host waits for every bucket
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": persistent_elements,
            "memory_efficient_linear": False,  # its own backward pass ignores autocast
        },
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=Towers(model, precision), optimizer=optimizer, config=settings)
    leave_norms(engine)
    if e.compile:
        engine.compile()
    return engine


def parameter_groups(model: DualEncoder, o: Optimizer) -> list[dict]:
    """The trained parameters by learning rate and weight decay, those that decay first; for `set_learning_rate`."""
    rates = layer_rates(model, o.layer_decay)
    groups: dict[tuple[bool, float], dict] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain, rate = no_weight_decay(name, parameter), rates[name]
            group = {"params": [], "weight_decay": 0.0 if plain else o.weight_decay, "multiplier": rate}
            groups.setdefault((plain, -rate), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def import_deepspeed():
    """DeepSpeed without the output that its import prints."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    warnings.filterwarnings("ignore", module="deepspeed")
    with _quiet_stderr():
        import deepspeed
        import deepspeed.ops

        # Without a GPU, init would compile a shared-memory communication kernel for a minute; gloo does that work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def start_deepspeed(timeout_minutes: float = 30, device: torch.device | None = None) -> None:
    """Join the process group that the launcher describes, or form a group of one; `device` is this rank's.

    A rank that waits longer than `timeout_minutes` for the others fails.
    """
    deepspeed = import_deepspeed()
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL's collectives of objects go through the current one
    distributed.init_process_group(timeout_minutes)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


@contextlib.contextmanager
def _quiet_stderr():
    """Discard stderr, of child processes too; exceptions pass."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
