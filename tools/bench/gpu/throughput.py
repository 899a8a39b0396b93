"""Images per second and MFU of a training step, beside open_clip's own model and loss in the same run.

A step is forward, loss, backward, clipping and AdamW on one GPU in bf16, with texts of the whole context on both sides:
ours by the trainer and its engine at ZeRO 0, open_clip's as in its own trainer, with fused AdamW. PCME++ has one
duplicated block a tower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.objectives import OBJECTIVES
from pretrain.plan.memory import memory
from pretrain.plan.peak import images_at, peak_flops
from pretrain.plan.trace import build
from tools.bench.gpu.memory import setting
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import TINY, Pool, configured, free, give_back, make_trainer, model_of

RATIO, MFU = 1.12, 0.45  # of PCME++'s step to open_clip's at most; of ViT-B/16 at least
SHARE = 0.6  # of the free memory that a batch may take by the plan
ROWS = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8)
BLOCKS, STEPS = 4, 4  # timed blocks, and steps of each
LIKELY = 45.0  # seconds of a first compilation
PEER = "open_clip"


def vit_b_32(place: Place, notes: Notes) -> None:
    """ViT-B/32."""
    compare("ViT-B-32", place, notes)


def vit_b_16(place: Place, notes: Notes) -> None:
    """ViT-B/16, which has a target for its MFU."""
    compare("ViT-B-16", place, notes)


def vit_l_14(place: Place, notes: Notes) -> None:
    """ViT-L/14."""
    compare("ViT-L-14", place, notes)


def compare(name: str, place: Place, notes: Notes) -> None:
    """All variants of one model, as many as there is time for: eager ones first, then compiled."""
    rows = 8 if place.small else most_rows(name, place)
    found, likely = {}, LIKELY
    notes.value("rows", rows)
    ours = [objective for objective in ("pcmepp", "clip") if objective in OBJECTIVES]
    variants = [(who, compiled) for compiled in (False, True) for who in ("pcmepp", PEER, *ours[1:])]
    for who, compiled in variants:
        title = f"{who}{', compiled' * compiled}"
        if compiled and not place.gpu:
            notes.skip(title, "compiled on a GPU only")
            continue
        if compiled and place.seconds_left() < 1.3 * likely:
            notes.skip(title, f"{place.seconds_left():.0f} s left; give --minutes more")
            continue
        began = time.monotonic()
        found[who, compiled] = one = measure(TINY if place.small else name, who, compiled, rows, place)
        likely = time.monotonic() - began if compiled else likely
        notes.value(title, one.told(place, name))
        notes.claim(f"{title}: the loss is finite", one.finite)
    judge(name, found, place, notes)


@dataclass(frozen=True)
class Speed:
    """seconds of a step (median), images/s, the share of the peak, GiB at most, whether the losses are finite."""

    seconds: float
    images: float
    mfu: float | None
    gib: float
    finite: bool

    def told(self, place: Place, name: str) -> dict[str, float]:
        """For the report."""
        values = {"ms a step": 1000 * self.seconds, "images/s": self.images}
        values |= {"MFU": self.mfu} if self.mfu is not None else {}
        return values | ({"GiB": self.gib} if place.gpu else {})


def judge(name: str, found: dict[tuple[str, bool], Speed], place: Place, notes: Notes) -> None:
    """The targets: of each side its faster variant, of those that there was time for on both."""
    both = [compiled for compiled in (False, True) if all((who, compiled) in found for who in ("pcmepp", PEER))]
    best = {who: min(found[who, compiled].seconds for compiled in both) for who in ("pcmepp", PEER)}
    notes.value(f"pcmepp / {PEER}", best["pcmepp"] / best[PEER])
    if not place.gpu or place.small:
        notes.skip("targets", "they are of a GPU and whole models")
        return
    notes.claim(f"PCME++'s step takes at most {RATIO} of open_clip's", best["pcmepp"] <= RATIO * best[PEER])
    shares = [one.mfu for (who, _), one in found.items() if who == "pcmepp" and one.mfu is not None]
    if not shares:
        notes.skip("MFU", "the peak of this GPU is not known (pretrain/plan/peak.py)")
    elif name == "ViT-B-16":
        notes.claim(f"ViT-B/16 has an MFU of at least {MFU:.0%}", max(shares) >= MFU)


def most_rows(name: str, place: Place) -> int:
    """The largest batch of ROWS that the plan finds room for; memory is linear in the rows."""
    config = configured(name, 64, zero_stage=0)
    model, s = build(config), setting(config, place)
    few, many = (memory(model, replace(s, rows=rows)).peak for rows in (32, 64))
    room = SHARE * torch.cuda.mem_get_info()[0]
    return next((rows for rows in ROWS if few + (many - few) * (rows - 32) / 32 < room), ROWS[-1])


def measure(name: str, who: str, compiled: bool, rows: int, place: Place) -> Speed:
    """The speed of one variant, by itself on the device."""
    torch._dynamo.reset()
    give_back()  # what the variant before has left
    make = open_clip_step if who == PEER else our_step
    variant = make(name, who, compiled, rows, place)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 if place.small else 3):
        variant.step()
    losses, blocks, steps = [variant.loss()], [], 1 if place.small else STEPS
    for _ in range(2 if place.small else BLOCKS):
        wait(place)
        began = time.perf_counter()
        for _ in range(steps):
            variant.step()
        wait(place)
        blocks.append((time.perf_counter() - began) / steps)
        losses.append(variant.loss())
    finite = bool(torch.stack(losses).isfinite().all())
    seconds = statistics.median(blocks)
    gib = torch.cuda.max_memory_allocated() / 2**30 if place.gpu else 0.0
    variant.release()
    return Speed(seconds, rows / seconds, share_of_peak(name, who, rows, seconds, place), gib, finite)


class Variant(NamedTuple):
    """step() queues a training step, loss() is that of the last one, release() gives the memory back."""

    step: Callable[[], object]
    loss: Callable[[], Tensor]
    release: Callable[[], None]


def wait(place: Place) -> None:
    """Until the device has done its work."""
    if place.gpu:
        torch.cuda.synchronize()


def share_of_peak(name: str, who: str, rows: int, seconds: float, place: Place) -> float | None:
    """The MFU; open_clip's model has the FLOPs of the objective clip. None where they or the peak are unknown."""
    objective = "clip" if who == PEER else who
    if not place.gpu or objective not in OBJECTIVES:
        return None
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    return rows / seconds / most_images(name, objective, rows, peak) if peak else None


@cache
def most_images(name: str, objective: str, rows: int, peak: float) -> float:
    """Images per second at the peak, with texts of the whole context; takes seconds."""
    config = configured_for(name, objective, rows)
    return images_at(peak, config, "bf16", 1)(build(config).context_length)


def configured_for(name: str, objective: str, rows: int, compiled: bool = False):
    """One duplicated block a tower for what has uncertainties."""
    return configured(name, rows, objective, 1, 1e-4, zero_stage=0, compile=compiled)


def our_step(name: str, objective: str, compiled: bool, rows: int, place: Place) -> Variant:
    """The trainer's step, queued as in a run."""
    config = configured_for(name, objective, rows, compiled)
    trainer = make_trainer(config, "bf16" if place.gpu else "fp32", place.device)
    images, tokens = next(Pool.of(model_of(trainer), rows, place.device).batches(1))
    images, tokens = images.clone(), tokens.clone()

    def loss() -> Tensor:
        terms = trainer.read_outcome()
        return torch.tensor(float("nan")) if terms is None else terms["loss"].cpu()

    return Variant(lambda: trainer.queue_step(images, tokens), loss, lambda: free(trainer))


def open_clip_step(name: str, who: str, compiled: bool, rows: int, place: Place) -> Variant:
    """open_clip's model and ClipLoss, called as in its trainer."""
    import open_clip
    from open_clip.loss import ClipLoss

    from probemb.models import no_weight_decay
    from probemb.models.architectures import OWN, read_architecture

    torch.manual_seed(0)
    with place.device:
        if name == TINY:
            open_clip.add_model_config(OWN[TINY])
        model = open_clip.create_model(name, output_dict=True).to(place.device).train()
    shape = read_architecture(name)
    pool = Pool(rows, shape["vision_cfg"]["image_size"], shape["text_cfg"].get("context_length", 77), place.device)
    images, tokens = (x.clone() for x in next(pool.batches(1)))
    o, loss_of = configured(name, rows).optimizer, ClipLoss()
    groups = [
        {"params": [p for n, p in model.named_parameters() if no_weight_decay(n, p) is skip], "weight_decay": decay}
        for skip, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=o.betas, eps=o.eps, fused=True)
    forward, losses = torch.compile(model) if compiled else model, []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(place.device.type, torch.bfloat16, enabled=place.gpu):
            out = forward(images, tokens)
            loss = loss_of(out["image_features"], out["text_features"], out["logit_scale"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad_norm)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        losses[:] = [loss.detach()]

    return Variant(step, lambda: losses[0].cpu(), lambda: None)
