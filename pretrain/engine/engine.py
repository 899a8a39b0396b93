"""The DeepSpeed engine around the towers: import without a word, process group, ZeRO settings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pretrain.engine.state import leave_norms
from probemb import distributed

if TYPE_CHECKING:
    from pretrain.config import Engine
    from probemb.models import DualEncoder

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # else it says what it finds
warnings.filterwarnings("ignore", module="deepspeed")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# Without a GPU, init would compile a shared-memory communication kernel for a minute; gloo does that work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
BUCKET = 50_000_000  # elements that ZeRO reduces or gathers at a time; DeepSpeed's own 5e8 would cost each GPU 4 GB


class Towers(nn.Module):
    """The module that the engine wraps: the model with flat tensors in and out, which every ZeRO stage can hook."""

    def __init__(self, model: DualEncoder, precision: str):
        super().__init__()
        self.model = model
        self.half = precision == "bf16"

    def forward(
        self, images: Tensor | None = None, tokens: Tensor | None = None, *masks: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Means and log-variances of the given inputs, (B, D) each; with both inputs also the means and log-variances
        of the masked copies that `masks`, as in `Masks`, ask for, and last the scalars (3,): inverse temperature, a, b.
        """
        kept, masked_image, masked_text = masks or (None, None, None)
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
    optimizer: torch.optim.Optimizer,
    options: Engine,
    batch_size: int,
    precision: str,
    device: torch.device,
    persistent_elements: int = 100_000,
):
    """A DeepSpeed engine around `Towers(model)`, after `start_deepspeed`; collective. `batch_size`: of all ranks;
    `persistent_elements`: parameters up to this size stay whole on every rank at ZeRO-3."""
    world = distributed.world_size()
    settings = {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size // world // options.accumulation,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 0.0,  # `state.optimizer_step` clips
        "zero_optimization": {
            "stage": options.zero_stage,
            "overlap_comm": device.type == "cuda" and world > 1,  # the host waits for every bucket
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": persistent_elements,
            "memory_efficient_linear": False,  # its own backward pass ignores autocast
        },
        "communication_data_type": options.gradient_dtype,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=Towers(model, precision), optimizer=optimizer, config=settings)
    leave_norms(engine)
    if options.compile:
        torch._dynamo.config.recompile_limit = 64  # graphs of a tower: 4 lengths, masked or not, with gradients or not
        for tower in (model.image_tower, model.text_tower):  # apart, as only texts have several shapes
            tower.compile(dynamic=False)
    return engine


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Inside, float32 matrix products on a GPU are computed in TF32 (10 bits of mantissa), or exactly."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def start_deepspeed(timeout_minutes: float = 30, device: torch.device | None = None) -> None:
    """Join the process group that the launcher describes, or form a group of one; `device` is this rank's."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL's collectives of objects go through the current one
    distributed.init_process_group(timeout_minutes)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
