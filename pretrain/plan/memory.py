"""What one rank of a pretraining run holds and computes, counted from the model's shapes; nothing is allocated.

Counted are the bytes of tensors: what a GPU's allocator reports as allocated, not what it reserves. Left out are the
CUDA context, NCCL's own buffers, the libraries' workspaces, and fragmentation.

Letters: B rows of one accumulation part, n rows of this rank's whole share of the batch, W ranks, N = W n, D dimensions
of the embedding, T tokens, E = B T width: elements of one layer's tokens, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.config import BUCKET

FP32 = 4  # bytes of an element
PLAIN_BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time without ZeRO
GPO_CODE, GRU_STATES = 32, 17  # GPO's weights: width of its recurrent network, and states that it keeps of a position


class Tower(NamedTuple):
    """One tower, image or text.

    Attributes:
        tokens: T, of the longest item.
        width, heads: of a block; `hidden`, the width inside its MLP.
        shared, own: blocks that both branches share, and blocks of each branch on its own (none: one branch).
        quick_gelu, layer_scale: what open_clip's block has beside the usual.
        gpo: pooling over all tokens instead of one.
        block, embedding, head: parameters of one block, of what is before the blocks and of what is behind them.
        matrices: parameters of a block that are cast for a matrix product under autocast; `patches`, of the embedding.
        norm_input, stream: bytes an element of what a LayerNorm keeps of its input, and of a block's input.
    """

    name: str
    tokens: int
    width: int
    heads: int
    hidden: int
    shared: int
    own: int
    quick_gelu: bool
    layer_scale: bool
    gpo: bool
    embed_dim: int
    image_size: int
    block: int
    embedding: int
    head: int
    matrices: int
    patches: int
    norm_input: int
    stream: int

    @property
    def blocks(self) -> int:
        """Blocks that a step runs, both branches."""
        return self.shared + 2 * self.own


class Piece(NamedTuple):
    """A part of the forward pass: bytes kept for the backward pass, bytes that this needs in passing, gradients."""

    saved: int
    passing: int
    gradients: int


@dataclass(frozen=True)
class Setting:
    """What decides the memory beside the model.

    Attributes:
        rows: n.
        parts: into which a rank cuts them.
        half: bfloat16 autocast.
        gpu: on a GPU communication overlaps the backward pass, with a second bucket.
    """

    world: int
    rows: int
    parts: int = 1
    zero_stage: int = 1
    half: bool = True
    gpu: bool = True
    checkpointing: bool = False
    pseudo_positive: bool = False


def build(config):
    """The model of a pretraining configuration on torch's meta device: shapes without weights, in a fraction of a
    second. Pretrained weights do not change shapes and are not looked at.

    Raises:
        UserError: the configuration names no model that can be built.
    """
    import torch

    from probemb.models import create_model

    m = config.model
    with torch.device("meta"):
        return create_model(m.name, embed_dim=m.embed_dim, n_unc_layers=m.n_unc_layers, head=m.head)


def count_parameters(model) -> dict[str, int]:
    """Parameters by part; the parts are disjoint and their sum is the whole."""
    embeddings = ("conv1", "class_embedding", "positional_embedding", "token_embedding", "cls_emb")
    heads = ("proj", "text_projection", "mean_head", "log_var_head")
    counts = dict.fromkeys(
        ("image trunk", "text trunk", "image uncertainty branch", "text uncertainty branch", "heads", "embeddings"), 0
    ) | {"scalars": 0}
    for name, parameter in model.named_parameters():
        tower, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        modality = "image" if tower == "visual" else "text"
        if not rest:
            key = "scalars"
        elif part in embeddings:
            key = "embeddings"
        elif part in heads:
            key = "heads"
        else:
            key = f"{modality} {'uncertainty branch' if part == 'uncertainty_transformer' else 'trunk'}"
        counts[key] += parameter.numel()
    return counts


def towers(model, half: bool, gpu: bool, text_tokens: int | None = None) -> tuple[Tower, Tower]:
    """Both towers' shapes; `text_tokens` is the length of the longest text of a batch, by default the context."""
    return (
        _tower(model, "image", model.visual, len(model.visual.positional_embedding), half, gpu),
        _tower(model, "text", model.text, min(text_tokens or model.context_length, model.context_length), half, gpu),
    )


def _tower(model, name: str, tower, tokens: int, half: bool, gpu: bool) -> Tower:
    from open_clip.transformer import LayerScale, QuickGELU

    block = tower.transformer.resblocks[0]
    own = len(tower.uncertainty_transformer.resblocks)
    size = sum(p.numel() for p in block.parameters())
    whole = sum(p.numel() for p in tower.parameters())
    n_blocks = len(tower.transformer.resblocks) + own
    before = ("conv1", "class_embedding", "positional_embedding", "token_embedding", "ln_pre")
    embedding = sum(p.numel() for n, p in tower.named_parameters() if n.partition(".")[0] in before)
    image = name == "image"
    return Tower(
        name=name,
        tokens=tokens,
        width=tower.transformer.width,
        heads=block.attn.num_heads,
        hidden=block.mlp.c_fc.out_features,
        shared=len(tower.transformer.resblocks) - own,
        own=own,
        quick_gelu=isinstance(block.mlp.gelu, QuickGELU),
        layer_scale=isinstance(block.ls_1, LayerScale),
        gpo=hasattr(tower, "mean_head"),
        embed_dim=model.embed_dim,
        image_size=model.image_size,
        block=size,
        embedding=embedding,
        head=whole - n_blocks * size - embedding,
        matrices=sum(p.numel() for p in block.parameters() if p.ndim == 2),
        patches=tower.conv1.weight.numel() if image else 0,
        # Autocast on a GPU normalises in float32, from a copy; on a CPU it does so in the type of the input. The
        # image tower's tokens are bfloat16 from its convolution on, the text tower's stay float32.
        norm_input=2 if half and image and not gpu else FP32,
        stream=2 if half and image else FP32,
    )


def block_bytes(t: Tower, rows: int, half: bool) -> int:
    """Bytes that one transformer block keeps for its backward pass."""
    element, ratio = (2 if half else FP32), t.hidden / t.width
    tokens = rows * t.tokens
    # The input of q, k and v, these three, what attention gives, the MLP's input; around its activation both sides.
    whole = 6 + ratio * (3 if t.quick_gelu else 2) + (2 if t.layer_scale else 0)
    saved = tokens * t.width * (2 * t.norm_input + whole * element)
    saved += tokens * FP32 * (2 * 2 + t.heads)  # two norms' means and deviations, the attention's log-sum-exp
    if half and t.name == "text":
        saved += t.tokens**2 * element  # the causal mask, cast anew in every block
    return int(saved)


def pieces(t: Tower, rows: int, half: bool, checkpointing: bool) -> Iterator[Piece]:
    """A tower's forward pass over `rows` items, in its order."""
    tokens, element = rows * t.tokens, 2 if half else FP32
    stream = tokens * t.width * FP32
    weights = 2 * t.matrices if half else 0  # bfloat16 copies live from the forward to the backward pass
    embedding = 0
    if t.name == "image":  # the first norm; under autocast also the pixels and the convolution's weight
        embedding = tokens * (t.width * t.norm_input + 2 * FP32)
        embedding += 2 * (rows * 3 * t.image_size**2 + t.patches) if half else 0
    yield Piece(embedding, 0, t.embedding * FP32)

    block, moving = block_bytes(t, rows, half) + weights, tokens * (t.width * 2 + t.hidden) * element
    copied = half and t.name == "image"  # both branches' first norms read the same tokens, or a copy each
    for i in range(t.blocks):
        if checkpointing:  # keep the block's input, and recompute the rest when it is needed
            saved = tokens * t.width * t.stream if i != t.shared + t.own else 0
            yield Piece(saved, block + moving, t.block * FP32)
        else:
            twice = 0 if copied or i != t.shared + t.own else tokens * t.width * t.norm_input
            yield Piece(block - twice, moving, t.block * FP32)

    vectors = 2 * rows * t.embed_dim * FP32
    if t.gpo:  # each head: its input, the sorted values, and 64-bit places of the sort
        per_head = stream + tokens * t.embed_dim * (FP32 + 8)
        heads = 2 * per_head
        if t.name == "text":  # the norm before the mean's head; weights for every length, from a recurrent network
            heads += stream + 2 * GRU_STATES * FP32 * GPO_CODE * t.tokens * (t.tokens + 1) // 2
        yield Piece(heads + vectors, tokens * t.embed_dim * 2 * FP32, t.head * FP32)
    else:
        norm = tokens * t.width * t.norm_input
        # In float32 the pooled vectors are views that keep all of an image's tokens; a text's are copied out.
        views = (2 if t.own else 1) * stream if t.name == "image" and not half else 0
        yield Piece(norm + views + vectors, stream, t.head * FP32)


def loss_bytes(n: int, world: int, d: int, pseudo_positive: bool = False) -> dict[str, int]:
    """Both losses over n rows of N = W n, in float32: gathered Gaussians, what belongs to items, N x M matrices.

    The matrices: two of CLIP's probabilities, and a distance and a logit for each direction (one, if there is one
    rank) of the match loss, kept for the backward pass; three more pass through it.
    """
    everyone = world * n
    directions = 2 if world > 1 else 1
    matrices = 2 + 2 * directions + (2 * 2 if pseudo_positive else 0) + 3
    return {
        "gathered": FP32 * 4 * d * (everyone + n) if world > 1 else 0,  # packed, and from all ranks
        "items": FP32 * d * (2 * everyone * (world > 1) + 10 * n),
        "matrices": FP32 * n * everyone * matrices,
    }


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    `weights`, `master`, `moments` and `batch` are there all the time; `peak` is the most that is there at one moment.
    `gradients`, `buckets`, `gathered_weights`, `activations` and `loss` are each one's own largest.
    """

    weights: int
    master: int
    moments: int
    batch: int
    gradients: int
    buckets: int
    gathered_weights: int
    activations: int
    loss: int
    peak: int
    peak_phase: str

    @property
    def state(self) -> int:
        """What is there between two steps, without the batch."""
        return self.weights + self.master + self.moments


def memory(model, s: Setting, text_tokens: int | None = None) -> Memory:
    """What a rank holds at most, walking through one step as the trainer and DeepSpeed do it."""
    p = FP32 * sum(q.numel() for q in model.parameters())
    stage, w = s.zero_stage, s.world
    share = p // w  # of one rank
    weights = share if stage == 3 else p
    master = share if stage else 0  # DeepSpeed's float32 partition beside float32 weights
    moments = 2 * (share if stage else p)
    both = towers(model, s.half, s.gpu, text_tokens)
    batch = s.rows * (3 * model.image_size**2 * FP32 + 8 * both[1].tokens)
    fixed = weights + master + moments + batch

    part = [list(pieces(t, -(-s.rows // s.parts), s.half, s.checkpointing)) for t in both]
    forward = part[0] + part[1]
    activations = sum(piece.saved for piece in forward)
    loss = sum(loss_bytes(s.rows, w, model.embed_dim, s.pseudo_positive).values())

    bucket = FP32 * (BUCKET if stage else PLAIN_BUCKET)
    flat = min(p, bucket)  # a bucket's gradients once more, flattened for the collective
    if stage == 0:
        buckets, accumulated = 0, p
    elif stage == 3:
        buckets, accumulated = bucket, share
    else:
        buckets = bucket * (2 if s.gpu else 1)  # allocated as large as allowed, whatever the model's size
        straight = stage == 2 or s.parts == 1  # gradients move into the bucket as they appear
        accumulated = (share if s.parts > 1 else 0) if straight else p
    gathered = p if stage == 3 and w > 1 else 0  # DeepSpeed keeps what it needs again within 1e9 elements

    # The backward pass frees activations from the end and makes gradients; earlier parts' are there already.
    growing = stage == 0 or (stage == 1 and accumulated == p)
    kept = accumulated if s.parts > 1 else 0
    now, top = activations + kept, 0
    for piece in reversed(forward):
        top = max(top, now + piece.passing + (piece.gradients if growing and not kept else 0))
        now += -piece.saved + (piece.gradients if growing and not kept else 0)
    persistent = fixed + (buckets + share if stage == 3 else 0)  # stage 3 holds bucket and gradients all the time
    during = persistent + gathered + (buckets if stage in (1, 2) else 0)
    embeddings = 2 * 4 * s.rows * model.embed_dim * FP32 if s.parts > 1 else 0
    phases = {
        "backward": during + top + embeddings + (loss if s.parts == 1 else 0),
        "loss": persistent + loss + embeddings,
        "gradient reduction": during + (p + flat if stage == 0 else flat + (share if s.parts > 1 and stage < 3 else 0)),
        "optimizer": persistent + (p if stage == 0 else 2 * share if stage < 3 else share),
    }
    phase = max(phases, key=phases.get)
    return Memory(
        weights=weights,
        master=master,
        moments=moments,
        batch=batch,
        gradients=max(accumulated, share),
        buckets=buckets + flat,
        gathered_weights=gathered,
        activations=activations,
        loss=loss,
        peak=phases[phase],
        peak_phase=phase,
    )
