"""ZeRO 1 to 3 by DeepSpeed: it cuts float32 parameters and Adam's moments into one flat tensor per rank and parameter
group (stage 3: subgroup).

Only this file uses private attributes of its optimizers, tested with 0.19.8 (pyproject.toml has the bound):

    stage 1, 2  `optimizer.bit16_groups`, `optimizer.single_partition_of_fp32_groups`, `parameter._hp_mapping`
    stage 3     `optimizer.fp16_groups`, `optimizer.fp32_partitioned_groups_flat`, `parameter.ds_tensor`
    1, 2, 3     `optimizer.averaged_gradients`, between the last backward pass of a step and the step
    1, 2, 3     the norms that `wrap` replaces

The public `safe_get_*` and `safe_set_*` need Adam's state to exist, see that of the first group only, leave the model's
own weights, and fail at stage 3 if the ranks do not divide the number of elements.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.engine.engine import BUCKET, Engine, Flat, Piece, piece
from probemb import distributed

if TYPE_CHECKING:
    from pretrain.config import Engine as Options

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # else it says what it finds
warnings.filterwarnings("ignore", module="deepspeed")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# Without a GPU, init would compile a shared-memory communication kernel for a minute; gloo does that work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
PERSISTENT = 100_000  # elements up to which a parameter stays whole on every rank at stage 3


class Sharded(Engine):
    """The optimizer's state shared out (ZeRO 1), the gradients too (2), and the weights (3)."""

    def __init__(self, module, optimizer, options: Options, batch_size: int, device):
        self.stage, self.batch_size = options.zero_stage, batch_size
        super().__init__(module, optimizer, options, device)

    def wrap(self, options: Options) -> None:
        world = distributed.world_size()
        self.flat = Flat(self.module, self.optimizer) if self.stage < 3 else None
        settings = {
            "train_batch_size": self.batch_size,
            "train_micro_batch_size_per_gpu": self.batch_size // world // self.parts,
            "gradient_accumulation_steps": self.parts,
            "gradient_clipping": 0.0,  # `step` clips
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.device.type == "cuda" and world > 1,  # the host waits for every bucket
                "contiguous_gradients": True,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": PERSISTENT,
                "memory_efficient_linear": False,  # its own backward pass ignores autocast
            },
            "communication_data_type": options.gradient_dtype,
            "steps_per_print": 10**9,
        }
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        given = {"model": self.flat or self.module, "optimizer": self.optimizer, "config": settings}
        self.deepspeed, *_ = deepspeed.initialize(**given)
        self.zero = self.deepspeed.optimizer
        if self.flat:
            self.flat.point()
        # DeepSpeed steps without computing the gradient's norm once more: up to a tenth of a step with few items.
        if self.stage == 3:
            self.zero._get_norm_groups = lambda: [torch.zeros(())]
        else:
            self.zero.scaled_global_norm = lambda *_, **__: 0.0

    def __call__(self, *inputs):
        return self.deepspeed(*inputs)

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        self.left -= 1
        if self.left:
            self.deepspeed.step()  # only counts the part

    def apply(self) -> None:
        self.deepspeed.step()

    def gradients(self) -> list[Tensor | None]:
        groups = self.zero.averaged_gradients.values()
        return [g for group in groups for g in ([group] if isinstance(group, Tensor) else group or ())]

    def cut(self) -> Iterator[tuple[nn.Parameter, Tensor, Piece | None]]:
        if self.stage < 3:
            groups = zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups)
            stepped = {flat: partition for group, partition in groups for flat in group}
            for p, flat, start in self.flat.places():
                at, first, end = flat._hp_mapping, 0, 0
                if at:  # this rank steps a piece of the flat parameter, and of this one what lies in it
                    inside, here = at.lp_fragment_address, at.hp_fragment_address
                    first, end = max(start, inside.start), min(start + p.numel(), inside.start + inside.numel)
                own = piece(first - start, end - first, here.start + first - inside.start) if first < end else None
                yield p, stepped[flat], own
        else:
            for group, flat in zip(self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat):
                offset = 0
                for p in group:
                    yield p, flat, _partition(p, offset)
                    offset += p.partition_numel()

    def shape(self, p: Tensor) -> torch.Size:
        return getattr(p, "ds_shape", p.shape)

    def own(self, p: nn.Parameter) -> tuple[Tensor, Piece]:
        """Stage 3: this rank's piece of a parameter of the module."""
        return p.ds_tensor, _partition(p)

    def put(self, p: nn.Parameter, whole: Tensor) -> None:
        if self.stage < 3:
            super().put(p, whole)
            return
        inside, here = _partition(p)
        p.ds_tensor.zero_()  # the padding is uninitialised memory
        p.ds_tensor.detach().view(-1)[here] = whole.reshape(-1)[inside]
        if p.ds_status.name == "AVAILABLE":  # whole in memory
            p.data.copy_(whole)


def _partition(p: nn.Parameter, offset: int = 0) -> Piece:
    """Stage 3: an equal part of every parameter on each rank, the last ones padded."""
    size = p.partition_numel()
    start = min(p.ds_numel, size * dist.get_rank(p.ds_process_group))
    return piece(start, min(size, p.ds_numel - start), offset)
