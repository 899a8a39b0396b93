"""FLOPs and memory of a pretraining step, from one pass over fake tensors (no memory, no time), and GPUs' peaks.

Letters: W ranks, n rows of this rank's share of the batch, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from weakref import finalize

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pretrain.config import BUCKET, Config
from pretrain.engine.engine import Towers
from pretrain.masking import has_copies, masks_of
from pretrain.objectives import MASKED_EVERY, OBJECTIVES, Objective, Pairs
from probemb import Gaussian, distributed
from probemb.errors import UserError, nearest
from probemb.models import DualEncoder

FP32 = 4  # bytes of an element
PLAIN_BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time without ZeRO
# Dense TFLOP/s by a part of the device's name, the more special names first: bf16 on tensor cores, and float32 outside
# of them, as torch computes it by default. From NVIDIA's and AMD's data sheets.
PEAKS = {
    "B200": (2250.0, 75.0),
    "GH200": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A40": (150.0, 37.4),
    "A30": (165.0, 10.3),
    "A10G": (70.0, 35.0),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
    "MI250X": (191.5, 23.9),  # one of its two dies, which are two devices
}


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a device, by the name that torch gives it, at "bf16" or "fp32"; None if unknown."""
    known = _find(name)
    return known and 1e12 * PEAKS[known][0 if precision == "bf16" else 1]


def _find(name: str) -> str | None:
    words = f" {name} ".replace("-", " ").replace("_", " ").upper()
    return next((known for known in PEAKS if f" {known.upper()} " in words), None)


def named_gpu(name: str) -> str:
    """The name in PEAKS of a GPU as people write it, such as "h200" or "a100-80gb". Raises UserError."""
    if (known := _find(name)) is None:
        what = f"The peak of the GPU '{name}' is not known.{nearest(name, PEAKS)}"
        raise UserError(what, f"Name one of {', '.join(PEAKS)}, or pass --peak-tflops from its data sheet.")
    return known


def gpu_of_this_machine() -> str | None:
    """The name in PEAKS of the first GPU here; None without one, or for one that is not there."""
    return _find(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def build(config: Config) -> DualEncoder:
    """The model of a configuration with fake weights, and their `fake_mode`; draws no random number.

    Raises UserError: the configuration names no model that can be built.
    """
    config = replace(config, model=replace(config.model, pretrained=None, image_weights=None))
    _start_autograd()
    with torch.random.fork_rng(devices=[]), init_empty_weights():
        model = config.create_model()
    with FakeTensorMode(allow_non_fake_inputs=True) as model.fake_mode:
        return model.to_empty(device="cpu")


@cache
def _start_autograd() -> None:
    """The first backward pass starts a thread for each kind of device, which a fake mode feigns, and never again in
    processes that are forked later."""
    torch.zeros((), requires_grad=True).backward()


@dataclass(frozen=True)
class Step:
    """A training step as the ranks share it: `world` ranks, and the accumulation `parts` of a rank's `rows`."""

    objective: Objective
    world: int
    rows: int
    text_tokens: int
    parts: int = 1
    zero_stage: int = 1
    half: bool = True
    checkpointing: bool = False
    patch_dropout: float = 0.0
    average: bool = False

    @classmethod
    def of(cls, config: Config, world: int, text_tokens: int, half: bool) -> Step:
        """A step of a run on `world` ranks. If they cannot share its batch, it has a larger one that they can."""
        e = config.engine
        parts = e.accumulation * (MASKED_EVERY if has_copies(config.loss) else 1)
        return cls(
            objective=OBJECTIVES[config.objective](config.loss),
            world=world,
            rows=-(-config.batch_size // (world * parts)) * parts,
            text_tokens=text_tokens,
            parts=e.accumulation,
            zero_stage=e.zero_stage,
            half=half,
            checkpointing=e.grad_checkpointing,
            patch_dropout=config.model.patch_dropout,
            average=config.ema.half_life_samples > 0,
        )

    @property
    def copies(self) -> bool:
        """True if items have masked copies."""
        return has_copies(self.objective.options)


@dataclass(frozen=True)
class Pass:
    """A pass forward and backward: FLOPs (recomputation is backward), bytes that the backward pass needs, and most
    bytes alive at one moment, without parameters' gradients."""

    forward_flops: float
    flops: float
    kept: int
    peak: int


class _Tracker(TorchDispatchMode):
    """Follows the storages that operators make until they are freed, and counts FLOPs of matrix products."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.now = self.most = self.flops = 0
        self._storages = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := (storage := t.untyped_storage())._cdata) not in self._storages:
                self._storages.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self._free, key, storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.now -= nbytes


def measure(forward: Callable[[], Iterable[Tensor]], known: list[Tensor]) -> Pass:
    """A forward pass on fake tensors, and the backward pass from all of its outputs; `known` exist before."""
    hooks = [t.register_post_accumulate_grad_hook(_drop) for t in known if t.requires_grad and t.is_leaf]
    try:
        with _Tracker(known) as tracker:
            outputs = [out for out in forward() if out.requires_grad]
            kept, flops = tracker.now, tracker.flops
            torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
    except RuntimeError as error:  # of fake tensors, whose values somebody asks for
        raise UserError(
            "The cost of this model cannot be computed: it depends on the values of a batch.",
            "Measure a short run instead, with pretrain.run --stop-at-step 50.",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return Pass(flops, tracker.flops, kept, tracker.most)


def _drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def towers_pass(model: DualEncoder, s: Step) -> Pass:
    """Both towers over one accumulation part of a rank's rows."""
    return _towers_pass(model, s.rows // s.parts, s.text_tokens, s.half, s.checkpointing, s.patch_dropout, s.copies)


@cache
def _towers_pass(model: DualEncoder, rows: int, text_tokens: int, half: bool, checkpointing: bool, dropout, copies):
    model.set_grad_checkpointing(checkpointing)
    towers = Towers(model, "bf16" if half else "fp32")
    with model.fake_mode:
        images = torch.empty(rows, 3, model.image_size, model.image_size, dtype=torch.uint8)
        tokens = torch.empty(rows, text_tokens, dtype=torch.int64)
        masks = masks_of(model, images, tokens, dropout, copies)
        known = [images, tokens, *(mask for mask in masks if mask is not None), *model.parameters(), *model.buffers()]
        return measure(lambda: towers(images, tokens, *masks), known)


def loss_pass(model: DualEncoder, s: Step) -> Pass:
    """The loss of one rank's rows among all ranks', from the Gaussians on."""
    return _loss_pass(s.objective, s.world, s.rows, model.embed_dim, s.rows // MASKED_EVERY if s.copies else 0)


@cache
def _loss_pass(objective: Objective, world: int, rows: int, dim: int, n: int) -> Pass:
    hops = min(world, 3) if objective.ring(world) else world  # a ring's memory is that of its second hop
    sizes = [(rows, dim)] * 4 + [(3,)] + [(n, dim)] * 4

    def forward() -> list[Tensor]:
        image, text, masked_image, masked_text = (Gaussian(*leaves[i : i + 2]) for i in (0, 2, 5, 7))
        masked = (masked_image, masked_text) if n else None
        return [objective(Pairs(image, text, *leaves[4].unbind(), masked)).loss]

    with FakeTensorMode(), distributed.pretend(hops):
        leaves = [torch.empty(size, requires_grad=True) for size in sizes]
        found = measure(forward, leaves)
    return replace(found, flops=world / hops * found.flops)


def step_flops(model: DualEncoder, s: Step) -> dict[str, float]:
    """FLOPs of one step over all ranks, two for a multiplication with its addition; matrix products only.

    `model`: forward and backward. `executed`: with recomputation for accumulation and checkpointing.
    """
    part, plain, loss = towers_pass(model, s), towers_pass(model, replace(s, checkpointing=False)), loss_pass(model, s)
    again = part.forward_flops if s.parts > 1 else 0
    return {
        "model": s.world * (s.parts * plain.flops + loss.flops),
        "executed": s.world * (s.parts * (part.flops + again) + loss.flops),
    }


def images_at(peak: float, config: Config, precision: str, world_size: int) -> Callable[[float], float]:
    """Images per second of all ranks at a peak of all of them in FLOP/s, for a mean length of the texts in tokens.

    Counts the model's FLOPs, without recomputation.
    """
    model = build(config)

    def work(tokens: int) -> float:
        step = Step.of(config, world_size, tokens, half=precision == "bf16")
        return step_flops(model, replace(step, parts=1, checkpointing=False))["model"]

    # Linear in the length but for attention, a small part: two lengths suffice.
    long, short = model.context_length, max(1, model.context_length // 4)
    most, least = work(long), work(short)
    return lambda tokens: config.batch_size * peak / (least + (most - least) * (tokens - short) / max(1, long - short))


def images_at_peak(
    config: Config, precision: str, world_size: int, device: torch.device
) -> Callable[[float], float] | None:
    """`images_at` the devices' peak; None where it is unknown, as a CPU's, or the model's FLOPs are."""
    if device.type != "cuda" or not (peak := peak_flops(torch.cuda.get_device_name(device), precision)):
        return None
    try:
        return images_at(world_size * peak, config, precision, world_size)
    except UserError:
        return None


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, as a GPU's allocator reports them: without the CUDA context, NCCL and fragmentation.

    Activations in bf16 are those of autocast on a CPU, which keeps a tenth less than on a GPU, where norms stay in
    float32. `peak` is what is held all the time, and the larger of the backward pass and the loss.
    """

    weights: int
    master: int
    moments: int
    average: int
    gradients: int
    buckets: int
    activations: int
    loss: int
    peak: int


def memory(model: DualEncoder, s: Step, gpu: bool = True) -> Memory:
    """Memory of a rank in a step of the trainer and DeepSpeed; with `gpu` communication overlaps the backward pass."""
    each, stage, several = [(p.numel(), p.requires_grad) for p in model.parameters()], s.zero_stage, s.parts > 1
    padded = s.world if stage == 3 else 1  # ZeRO 3 pads each parameter to a multiple of the ranks
    whole, trained = (
        FP32 * sum(-(-n // padded) * padded for n, trains in each if trains or every) for every in (True, False)
    )
    share = trained // s.world  # of one rank
    bucket = FP32 * BUCKET
    # Allocated as large as allowed, whatever the model's size; without ZeRO gradients are flattened once more.
    buckets = {0: min(trained, FP32 * PLAIN_BUCKET), 3: bucket}.get(stage, bucket * (2 if gpu and s.world > 1 else 1))
    # Without accumulation ZeRO's gradients go straight into the bucket, and to the rank that steps them.
    gradients = trained if stage == 0 or (stage == 1 and several) else share
    gathered = whole if stage == 3 and s.world > 1 else 0  # kept until they are needed again, within 1e9 elements
    towers, loss = towers_pass(model, s), loss_pass(model, s)
    images = s.rows * (3 * model.image_size**2 + 8 * s.text_tokens)
    embeddings = 3 * 4 * s.rows * model.embed_dim * FP32 if several else 0  # of every part, of all, and gradients
    weights, optimizer = whole // s.world if stage == 3 else whole, share if stage else trained
    master, average = share if stage else 0, s.average * optimizer
    held = weights + master + 2 * optimizer + average + images + gathered + embeddings
    during = max(towers.peak + gradients + (buckets if stage else 0), gradients + buckets, towers.kept + loss.peak)
    return Memory(weights, master, 2 * optimizer, average, gradients, buckets, towers.kept, loss.peak, held + during)
