"""The memory of one rank of a pretraining run: traced activations, and arithmetic for what DeepSpeed holds.

Counted are the bytes of tensors: what a GPU's allocator reports as allocated, not what it reserves. Left out are the
CUDA context, NCCL's own buffers, the libraries' workspaces, and fragmentation.

Letters: n rows of this rank's whole share of the batch, W ranks, D dimensions of the embedding, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import BUCKET
from pretrain.plan.trace import Trace

FP32 = 4  # bytes of an element
PLAIN_BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time without ZeRO


@dataclass(frozen=True)
class Setting:
    """How a run is spread over ranks.

    Attributes:
        world: W.
        rows: n.
        parts: into which a rank cuts its rows (accumulation).
        gpu: on a GPU communication overlaps the backward pass, with a second bucket.
        text_tokens: length of the longest text of a batch.
    """

    world: int
    rows: int
    parts: int = 1
    zero_stage: int = 1
    gpu: bool = True
    text_tokens: int = 77


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
        """Bytes between two steps, without the batch."""
        return self.weights + self.master + self.moments


def memory(model, s: Setting, towers: Trace, loss: Trace) -> Memory:
    """The most that a rank holds in a step of the trainer and DeepSpeed.

    Args:
        towers: trace of one part, `trace_towers`.
        loss: trace of all of the rank's rows, `trace_loss`.
    """
    p = FP32 * sum(q.numel() for q in model.parameters())
    stage, several = s.zero_stage, s.parts > 1
    share = p // s.world  # of one rank
    weights = share if stage == 3 else p
    master = share if stage else 0  # DeepSpeed's float32 partition beside float32 weights
    moments = 2 * (share if stage else p)
    batch = s.rows * (3 * model.image_size**2 * FP32 + 8 * s.text_tokens)

    bucket = FP32 * (BUCKET if stage else PLAIN_BUCKET)
    flat = min(p, bucket)  # a bucket's gradients once more, flattened for the collective
    if stage == 0:
        buckets, accumulated = 0, p
    elif stage == 3:
        buckets, accumulated = bucket, share
    else:
        buckets = bucket * (2 if s.gpu else 1)  # allocated as large as allowed, whatever the model's size
        straight = stage == 2 or not several  # gradients move into the bucket as they appear
        accumulated = (share if several else 0) if straight else p
    gathered = p if stage == 3 and s.world > 1 else 0  # DeepSpeed keeps what it needs again within 1e9 elements

    # Gradients grow while activations are freed, or earlier parts' are there already, or they leave for the bucket.
    growing = (stage == 0 or accumulated == p) and not several
    backward = towers.with_gradients if growing else towers.peak + (accumulated if several else 0)
    embeddings = 3 * 4 * s.rows * model.embed_dim * FP32 if several else 0  # of every part, of all, and gradients
    persistent = weights + master + moments + batch
    persistent += buckets + share if stage == 3 else 0  # stage 3 holds bucket and gradients all the time
    during = persistent + gathered + (buckets if stage in (1, 2) else 0)
    phases = {
        "backward": during + backward + embeddings,
        "loss": persistent + loss.peak + (embeddings if several else towers.kept),
        "gradient reduction": during + (p + flat if stage == 0 else flat + (share if several and stage < 3 else 0)),
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
        activations=int(towers.kept),
        loss=int(loss.peak),
        peak=int(phases[phase]),
        peak_phase=phase,
    )
