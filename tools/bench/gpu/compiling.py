"""torch.compile of the towers, for every objective."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.engine.engine import Towers
from pretrain.objectives import OBJECTIVES
from pretrain.trainer import Forward, Trainer
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import TINY, Pool, configured, make_model, without_tf32

DIFFERENCE = 1e-3  # of the compiled loss and gradients, relative


def objectives(place: Place, notes: Notes) -> None:
    """Both towers are one graph under autocast; compiled, they give the loss and the gradients of the eager ones."""
    without_tf32()
    # A CPU's inductor needs a C++ compiler and a minute: the reduced form compiles with autograd's graphs alone.
    name, rows, backend = ("ViT-Tiny-64", 16, "inductor") if place.gpu and not place.small else (TINY, 4, "aot_eager")
    notes.value("backend", backend)
    for objective in OBJECTIVES:
        config = configured(name, rows, objective)
        model = make_model(config, place.device)
        batch = next(Pool.of(model, rows, place.device).batches(1))
        torch._dynamo.reset()
        graphs = torch._dynamo.explain(Towers(model, "bf16"))(*batch)
        notes.value(f"{objective}: graphs", graphs.graph_count)
        for reason in graphs.break_reasons:
            notes.value(f"{objective}: break", str(reason.reason)[:300])
        whole = graphs.graph_count == 1 and graphs.graph_break_count == 0
        notes.claim(f"{objective}: the towers are one graph", whole)
        if not whole:
            continue
        torch._dynamo.reset()
        trainer = Trainer(None, None, config, place.device, 1)
        eager = loss_and_gradients(trainer, Towers(model, "fp32"), batch)
        compiled = loss_and_gradients(
            trainer, torch.compile(Towers(model, "fp32"), backend=backend, fullgraph=True), batch
        )
        off = [abs(a - b) / b for a, b in zip(compiled[:1], eager[:1])]
        off.append(float((compiled[1] - eager[1]).norm() / eager[1].norm()))
        notes.value(f"{objective}: compiled differs by", {"loss": off[0], "gradient": off[1]})
        notes.claim(f"{objective}: compiled towers give the eager loss and gradient", max(off) < DIFFERENCE)


def loss_and_gradients(trainer: Trainer, towers, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    """The objective's loss of a batch, and the gradients of all weights as one vector."""
    towers.zero_grad(set_to_none=True)
    loss, _ = trainer.loss(Forward.of(towers(*batch)))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in towers.parameters() if p.grad is not None])
