"""What one step of a pretraining run computes and sends, counted from the model's shapes.

Letters: n rows of a rank, W ranks, D dimensions of the embedding, T tokens.
"""

from __future__ import annotations

from pretrain.plan.memory import FP32, Setting, Tower, towers

MAX_REUSE = 1_000_000_000  # elements: ZeRO 3 keeps gathered parameters that it needs again within so many


def forward_flops(t: Tower) -> tuple[int, int]:
    """FLOPs of one item's way through a tower, two for a multiplication with its addition: of its blocks, and of the
    rest. Matrix products only: norms, activations and softmax are about a hundredth."""
    blocks = t.blocks * (2 * t.matrices * t.tokens + 4 * t.tokens**2 * t.width)
    rest = 2 * t.patches * (t.tokens - 1)  # every token but the class token is a patch
    rest += 2 * 2 * t.width * t.embed_dim * (t.tokens if t.gpo else 1)
    return blocks, rest


def flops(model, s: Setting, text_tokens: int | None = None) -> dict[str, int]:
    """Of one step over all ranks.

    `model_per_step`: forward and backward, the latter twice the former. `executed_per_step`: with what is computed
    again: all of the forward pass for accumulation, the blocks for gradient checkpointing.
    """
    blocks = rest = 0
    for t in towers(model, s.half, s.gpu, text_tokens):
        one, other = forward_flops(t)
        blocks, rest = blocks + one, rest + other
    everyone = s.rows * s.world
    products = 2 + (2 if s.world > 1 else 1)  # CLIP's two matrices, the distances of each direction
    loss = 3 * products * 2 * everyone * everyone * model.embed_dim
    again = (blocks + rest if s.parts > 1 else 0) + (blocks if s.checkpointing else 0)
    return {
        "model_per_step": everyone * 3 * (blocks + rest) + loss,
        "executed_per_step": everyone * (3 * (blocks + rest) + again) + loss,
    }


def network(model, s: Setting) -> dict[str, int]:
    """Bytes that each rank sends in a step, and receives as many, if collectives run as rings.

    Gaussians are float32, packed as (n, 4, D). Gradients and weights are float32 too (communication_data_type).
    ZeRO 1 and 2 of DeepSpeed all-reduce their buckets, from which each rank keeps its partition.
    """
    elements = sum(p.numel() for p in model.parameters())
    others, share = s.world - 1, FP32 * elements * (s.world - 1) // s.world
    gaussians = others * s.rows * 4 * model.embed_dim * FP32
    stage = s.zero_stage
    times = s.parts if stage >= 2 else 1  # stages 2 and 3 reduce after every part
    if stage == 3:
        gradients = times * share
        # Gathered once where the backward pass finds the weights still there. With accumulation every part goes forward
        # twice, and what DeepSpeed recorded of the one pass is not the order of the other: it gathers for each.
        passes = 3 * s.parts if s.parts > 1 else 1 if elements <= MAX_REUSE else 2
        weights = passes * share
    else:
        gradients = times * 2 * share
        weights = share if stage else 0  # what every rank has updated, to all
    # Backward is a reduce-scatter with NCCL, and an all-reduce with gloo.
    parts = {"gaussians_forward": gaussians, "gaussians_backward": gaussians * (1 if s.gpu else 2)}
    parts |= {"gradients": gradients, "weights": weights}
    return {**parts, "total": sum(parts.values())}
