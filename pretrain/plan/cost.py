"""FLOPs and network traffic of a pretraining step."""

from __future__ import annotations

from dataclasses import replace

from pretrain.plan.memory import FP32, padded_elements
from pretrain.plan.trace import Setting, trace_loss, trace_part
from probemb.models import DualEncoder

MAX_REUSE = 1_000_000_000  # elements: ZeRO 3 keeps gathered parameters that it needs again within so many


def flops(model: DualEncoder, s: Setting) -> dict[str, float]:
    """FLOPs of one step over all ranks, two for a multiplication with its addition; matrix products only.

    `model_per_step`: forward and backward. `executed_per_step`: with recomputation for accumulation and checkpointing.
    """
    part, plain = trace_part(model, s), trace_part(model, replace(s, checkpointing=False))
    again, loss = part.forward_flops if s.parts > 1 else 0, trace_loss(model, s).flops
    return {
        "model_per_step": s.world * (s.parts * plain.flops + loss),
        "executed_per_step": s.world * (s.parts * (part.flops + again) + loss),
    }


def network(model: DualEncoder, s: Setting) -> dict[str, int]:
    """Bytes that each rank sends, and receives, in a step, if collectives run as rings.

    Embeddings are float32. Gradients and weights are float32 too (communication_data_type).
    ZeRO 1 and 2 of DeepSpeed all-reduce their buckets, from which each rank keeps its partition.
    """
    elements = padded_elements(model, s)
    others, share = s.world - 1, FP32 * elements * (s.world - 1) // s.world
    there, back = (FP32 * s.rows * numbers for numbers in s.objective.travels(model.embed_dim, s.world))
    stage = s.zero_stage
    times = s.parts if stage >= 2 else 1  # stages 2 and 3 reduce after every part
    if stage == 3:
        gradients = times * share
        # Gathered once if the backward pass finds the weights still there. With accumulation every part goes forward
        # twice, in another order than DeepSpeed recorded, and it gathers for each pass.
        passes = 3 * s.parts if s.parts > 1 else 1 if elements <= MAX_REUSE else 2
        weights = passes * share
    else:
        gradients = times * 2 * share
        weights = share if stage else 0  # every rank sends its updated part
    # Gradients of gathered items are a reduce-scatter with NCCL, and an all-reduce with gloo; in a ring they go round
    # with the items, and come home.
    back *= s.world * (others > 0) if s.objective.ring(s.world) else others * (1 if s.gpu else 2)
    parts = {"gaussians_forward": others * there, "gaussians_backward": back}
    parts |= {"gradients": gradients, "weights": weights}
    return {**parts, "total": sum(parts.values())}
