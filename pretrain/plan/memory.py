"""The memory of one rank of a pretraining run: traced activations, and arithmetic for what DeepSpeed holds.

Counted are the bytes of tensors: what a GPU's allocator reports as allocated, not what it reserves. Left out are the
CUDA context, NCCL's own buffers, the libraries' workspaces, and fragmentation.

Letters: n rows of this rank's whole share of the batch, W ranks, D dimensions of the embedding, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import BUCKET
from pretrain.plan.trace import Setting, input_bytes, trace_loss, trace_part
from probemb.models import DualEncoder

FP32 = 4  # bytes of an element
PLAIN_BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time without ZeRO


def count_parameters(model: DualEncoder) -> dict[str, int]:
    """Parameters by part; the parts are disjoint and their sum is the whole."""
    parts = ("image trunk", "text trunk", "image uncertainty branch", "text uncertainty branch", "heads")
    counts = dict.fromkeys(parts, 0)
    for modality, tower in (("image", model.visual), ("text", model.text)):
        names = {"trunk": f"{modality} trunk", "branch": f"{modality} uncertainty branch", "head": "heads"}
        for name, parameter in tower.named_parameters():
            counts[names[tower.place(name).part]] += parameter.numel()
    total = sum(p.numel() for p in model.parameters())
    return counts | {"scalars": total - sum(counts.values())}


def padded_elements(model: DualEncoder, s: Setting, trained: bool = False) -> int:
    """Elements of all parameters, or of the trained ones; ZeRO 3 pads each to a multiple of the ranks."""
    each = [q.numel() for q in model.parameters() if q.requires_grad or not trained]
    return sum(-(-n // s.world) * s.world for n in each) if s.zero_stage == 3 else sum(each)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    `weights`, `master`, `moments`, `average` and `batch` are held all the time; `peak` is the largest total.
    `gradients`, `buckets`, `gathered_weights`, `activations` and `loss` are separate maxima.
    """

    weights: int
    master: int
    moments: int
    average: int
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
        return self.weights + self.master + self.moments + self.average


def memory(model: DualEncoder, s: Setting, exact: bool = True) -> Memory:
    """Memory of a rank in a step of the trainer and DeepSpeed; `exact` as in `trace_part`."""
    towers, loss = trace_part(model, s, exact), trace_loss(model, s)
    p = FP32 * padded_elements(model, s)
    stage, several = s.zero_stage, s.parts > 1
    trained = FP32 * padded_elements(model, s, trained=True)
    weights = p // s.world if stage == 3 else p
    whole, p = p, trained  # of frozen parameters there are the weights alone
    share = p // s.world  # of one rank
    master = share if stage else 0  # DeepSpeed's float32 partition beside float32 weights
    moments = 2 * (share if stage else p)
    average = s.average * (share if stage else p)
    batch, masks = input_bytes(model, s)

    bucket = FP32 * (BUCKET if stage else PLAIN_BUCKET)
    flat = min(p, bucket)  # a bucket's gradients once more, flattened for the collective
    if stage == 0:
        buckets, accumulated = 0, p
    elif stage == 3:
        buckets, accumulated = bucket, share
    else:
        buckets = bucket * (
            2 if s.gpu and s.world > 1 else 1
        )  # allocated as large as allowed, whatever the model's size
        straight = stage == 2 or not several  # gradients move into the bucket as they appear
        accumulated = (share if several else 0) if straight else p
    gathered = whole if stage == 3 and s.world > 1 else 0  # DeepSpeed keeps what it needs again within 1e9 elements

    # Gradients grow while activations are freed, or those of earlier parts are there already, or a bucket takes them.
    backward = towers.with_gradients if stage == 0 and not several else towers.peak + several * accumulated
    embeddings = (
        3 * 4 * (s.rows + s.copies) * model.embed_dim * FP32 if several else 0
    )  # of every part, of all, and gradients
    persistent = weights + master + moments + average + batch + masks
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
        average=average,
        batch=batch,
        gradients=max(accumulated, share),
        buckets=buckets + flat,
        gathered_weights=gathered,
        activations=int(towers.kept),
        loss=int(loss.peak),
        peak=int(phases[phase]),
        peak_phase=phase,
    )
