"""FLOPs and memory of a pretraining step, from one pass over fake tensors (no memory, no time), and GPUs' peaks.

The loss is left out: with a ring, and up to 64 ranks without, it has under 1 % of the towers' FLOPs and memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config import Config
from pretrain.engine.engine import BUCKET, CHUNK, Towers
from pretrain.objectives import draw_masks
from probemb.errors import UserError

FP32 = 4  # bytes of an element
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


def find_gpu(name: str) -> str | None:
    """The name in PEAKS of a GPU as torch or a user writes it, such as "h200" or "a100-80gb"."""
    words = f" {name} ".replace("-", " ").replace("_", " ").upper()
    return next((known for known in PEAKS if f" {known.upper()} " in words), None)


class StepCost:
    """The cost of a configuration's step on `world` ranks, in bf16 if `half`, with texts of `text_tokens`, 0 for all.

    Each rank's `rows` are cut into `parts`. Of one part: `forward_flops`, and `flops` with the backward pass; `kept`,
    the bytes that this needs, and `most`, alive at one moment, without the gradients of parameters."""

    def __init__(self, config: Config, world: int, half: bool, text_tokens: int = 0):
        self.config, self.world, self.parts = config, world, config.engine.accumulation
        self.rows = config.batch_size // world
        torch.zeros((), requires_grad=True).backward()  # its threads start outside of the fake mode
        bare = replace(config, model=replace(config.model, pretrained=None, image_weights=None))
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = bare.create_model(grad_checkpointing=config.engine.grad_checkpointing)
        self.text_tokens = min(text_tokens or model.context_length, model.context_length)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                self.model = model.to_empty(device="cpu")
                shape = self.rows // self.parts, 3, model.image_size, model.image_size
                images = torch.empty(shape, dtype=torch.uint8)
                tokens = torch.empty(len(images), self.text_tokens, dtype=torch.int64)
                given = images, tokens, *draw_masks(config, model, images, tokens, samples=0)
                self._measure(Towers(model, "bf16" if half else "fp32"), given)
        except RuntimeError as error:  # the model reads the values of a fake tensor
            what = "The cost of this model cannot be computed: it depends on the values of a batch."
            raise UserError(what, "Measure a short run instead, with pretrain.run --stop-at-step 50.") from error

    def _measure(self, towers: Towers, given: Iterable[Tensor | None]) -> None:
        for parameter in (p for p in towers.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        known = [*(t for t in given if t is not None), *towers.parameters(), *towers.buffers()]
        with FlopCounterMode(display=False) as counter, _Storages(known) as storages:
            outputs = [out for out in towers(*given) if out.requires_grad]
            self.kept, self.forward_flops = storages.now, counter.get_total_flops()
            torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
        self.most, self.flops = storages.most, counter.get_total_flops()

    @property
    def step_flops(self) -> float:
        """Of all ranks, recomputation included; two for a multiplication with its addition, matrix products only."""
        again = self.forward_flops if self.parts > 1 else 0
        return self.world * self.parts * (self.flops + again)

    def memory(self, stage: int) -> dict[str, int]:
        """Bytes on a rank with a GPU at a ZeRO stage, by part, as the allocator reports them: without the CUDA context,
        NCCL and fragmentation. Activations in bf16 are those of autocast on a CPU, a tenth less than on a GPU, where
        norms stay in float32. "peak" is what is held all the time, and the backward pass."""
        world, several = self.world, self.parts > 1
        padded = world if stage == 3 else 1  # ZeRO 3 pads each parameter to a multiple of the ranks
        sizes = [(FP32 * -(-p.numel() // padded) * padded, p.requires_grad) for p in self.model.parameters()]
        whole, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
        share = trained // world  # of one rank
        # Gradients are put together in chunks; ZeRO's buckets are as large as allowed, whatever the model's size.
        buckets = FP32 * BUCKET * {0: 0, 3: 1}.get(stage, min(world, 2)) + min(trained, FP32 * CHUNK) * (stage < 3)
        # Without accumulation ZeRO's gradients go straight into the bucket, and to the rank that steps them.
        gradients = trained if stage == 0 or (stage == 1 and several) else share
        gathered = whole if stage == 3 and world > 1 else 0  # kept until they are needed again, within 1e9 elements
        images = self.rows * (3 * self.model.image_size**2 + 8 * self.text_tokens)
        embeddings = 3 * 4 * self.rows * self.model.embed_dim * FP32 if several else 0  # of parts, of all, gradients
        parts = {"weights": whole // world if stage == 3 else whole, "master": share if stage else 0}
        parts["moments"] = 2 * (share if stage else trained)
        parts["average"] = parts["moments"] // 2 * (self.config.ema.half_life_samples > 0)
        held = sum(parts.values()) + images + gathered + embeddings
        parts |= {"gradients": gradients, "buckets": buckets, "activations": self.kept}
        return parts | {"peak": held + gradients + max(self.most + (buckets if stage else 0), buckets)}


class _Storages(TorchDispatchMode):
    """Bytes of the storages that operators make, until they are freed."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.now = self.most = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := (storage := t.untyped_storage())._cdata) not in self._seen:
                self._seen.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self._free, key, storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def images_at_peak(config: Config, precision: str, world: int, device: torch.device) -> Callable[[float], float] | None:
    """Images/s of all ranks at the devices' peak, for a mean length of the texts in tokens, without recomputation; None
    where the peak is unknown, as a CPU's, or the model's FLOPs are."""
    known = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None:
        return None
    config = replace(config, engine=replace(config.engine, accumulation=1, grad_checkpointing=False))
    half = precision == "bf16"
    peak = world * 1e12 * PEAKS[known][0 if half else 1]
    try:
        cost = StepCost(config, world, half)
        long, short = cost.text_tokens, max(1, cost.text_tokens // 4)
        most, least = cost.step_flops, StepCost(config, world, half, short).step_flops
    except UserError:
        return None
    # Linear in the length but for attention, a small part: two lengths suffice.
    return lambda tokens: config.batch_size * peak / (least + (most - least) * (tokens - short) / max(1, long - short))
