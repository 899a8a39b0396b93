"""The trainer: one engine, one step, one loop.

Letters: B items of this rank's share of the batch, W ranks, N = W B items of the global batch, D dimensions.

The towers run inside the engine; everything after them, from the Gaussians on, is float32 and outside it. With
accumulation the negatives stay the whole batch: embeddings are computed part by part without a graph, the loss gives
their gradients, and every part is recomputed from the same random state to propagate them (Gao et al., "Scaling deep
contrastive learning batch size under memory limited setup", 2021).

A new number in the log: `loss_and_terms` (or `train_step`) names it, and `probemb.runs.log.train_line` shows it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pretrain.engine.checkpoint import Average, random_state, set_random_state
from pretrain.engine.engine import tf32
from pretrain.objectives import Pairs, draw_masks
from pretrain.run_folder import RunFolder
from pretrain.schedules import learning_rate, step_weight
from probemb import distributed
from probemb.distributed import all_of
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.models.dual_encoder import DualEncoder, layer_rates, no_weight_decay
from probemb.runs.log import Window, step_of
from probemb.runs.watchdog import Progress

if TYPE_CHECKING:
    from pretrain.config import Config, Optimizer
    from pretrain.engine.engine import Engine
    from pretrain.evaluate import Evaluator
    from pretrain.stream.stream import Batch, Stream

MAX_SKIPPED = 100  # steps in a row; more come from the weights, not the samples
SHOWN = 8  # sample keys in a message
COLLECT_EVERY = 1000  # steps


class Position(NamedTuple):
    """Steps done, samples seen in them, and how many of the steps were skipped."""

    step: int = 0
    samples: int = 0
    skipped: int = 0


class _Stopped(Exception):
    """The ranks have agreed to stop instead of taking another batch."""


class Trainer:
    """Trains an engine (`engine.engine.make_engine`) on the stream of this rank's batches, up to step `steps`.

    `average` follows the weights and takes their place in evaluations; `stop`: whether this process was asked to stop;
    `images_at_peak`: images/s at the devices' peak for a mean length of texts, for the MFU."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        stream: Stream,
        folder: RunFolder,
        steps: int,
        position: Position = Position(),  # noqa: B008 (immutable)
        average: Average | None = None,
        evaluators: Sequence[Evaluator] = (),
        stop: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
        images_at_peak: Callable[[float], float] | None = None,
    ):
        self.config, self.engine, self.stream, self.folder, self.average = config, engine, stream, folder, average
        self.step, self.samples, self.skipped = position
        self.steps, self.total = steps, self.samples + (steps - self.step) * config.batch_size
        self.last = max(self.step, min(steps, config.stop_at_step or steps))
        self.first = self.step + 1
        self.evaluators, self.stop, self.images_at_peak = evaluators, stop, images_at_peak
        self.progress = progress or Progress(self.step)
        self.stopping, self.skipped_in_a_row = False, 0  # agreed by all ranks
        self.loss_and_terms, self.text_multiple = partial(loss_and_terms, config.loss), 1
        if config.engine.compile:  # each length has a graph of its own
            self.text_multiple = 8 * -(-engine.module.model.context_length // 32)
        if config.engine.compile == "step":
            self.loss_and_terms = torch.compile(self.loss_and_terms, dynamic=False)
        self.window, self.began = Window("images", lambda: stream.wait_seconds, engine.device), time.perf_counter()

    def fit(self) -> bool:
        """Train to the last step, to `stop_at_step`, or until `stop`; returns whether it was stopped before the end.
        Evaluations that the run that it resumes has not made come first."""
        going = True
        if self.step and self._evaluation_is_due():
            going = self.evaluate([one for one in self.evaluators if one.keys[0] not in self.folder.logged])
        self.window.restart()
        self.began = time.perf_counter()
        try:
            while going and self.step < self.last:
                with self.folder.traced(self.step + 1):
                    going = self.train_step()
                self._collect_garbage()
        finally:
            gc.unfreeze()
            gc.enable()
        if self.stopping and self.step >= self.first:
            self.save()
        return self.stopping and (self.step < self.last or not going)

    def train_step(self) -> bool:
        """Load, forward, loss, backward, step, log, save, evaluate; False if the run stops here. Collective."""
        config, engine, o, parts = self.config, self.engine, self.config.engine, self.config.engine.accumulation
        # ---- load: this rank's share of the batch, on all ranks or on none
        if (batch := self.load()) is None:
            return False
        self.progress.doing("computing")
        model, images = engine.module.model, batch.images.to(engine.device, non_blocking=True)
        tokens = model.cut_padding(batch.tokens, engine.device, self.text_multiple)  # (B, L)
        masks = draw_masks(config, model, images, tokens, self.samples)
        # ---- forward, loss, backward
        with tf32(engine.module.half and o.tf32 is not None):
            inputs = [(i, t, *m) for i, t, m in zip(images.chunk(parts), tokens.chunk(parts), masks.chunk(parts))]
            with torch.set_grad_enabled(parts == 1):  # of several parts, the gradient cache
                states, cached = zip(*((random_state(), engine(*given)) for given in inputs))
            *embeddings, scalars = zip(*cached)  # means and log-variances (B, D), scalars (3,)
            outputs = [t.detach().requires_grad_() for t in (*map(torch.cat, embeddings), scalars[0])]
            with tf32(engine.module.half and o.tf32 == "all"):
                loss, terms = self.loss_and_terms(outputs)
                gradients = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
            after = random_state()  # the loss may draw, too
            for part, (given, state, found) in enumerate(zip(inputs, states, cached)):
                if parts > 1:
                    set_random_state(state)
                    found = engine(*given)
                *embeddings, scalars = found
                carried = sum((e * g.chunk(parts)[part]).sum() for e, g in zip(embeddings, gradients))
                engine.backward(carried + (scalars * gradients[-1]).sum() / parts)  # which every part has
            set_random_state(after)
        # ---- step, unless the loss or the gradient is NaN or Inf on any rank
        own, clip = engine.gradient_norm(), config.optimizer.clip_grad_norm
        nonfinite = ~(loss.detach().isfinite() & own.isfinite())
        flags = nonfinite, self.stop(), self.folder.failed, own.square()
        found = distributed.sum_over_ranks(flags, engine.device)
        read, norm = distributed.begin_reading(found), found[-1].sqrt()
        self.step, self.samples, before = self.step + 1, self.samples + config.batch_size, self.samples
        lr = learning_rate(config.optimizer, self.samples, self.total)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr * group["multiplier"]
        engine.step(found[0], norm, clip)
        bad, stops, failed, _ = read()  # while a GPU steps
        if failed:
            self.folder.check()
        self.stopping = stops > 0
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad else 0
        if bad:
            self._skip(nonfinite_report(batch.keys, loss, terms, outputs[:4], gradients[:4], own))
        elif self.average:
            self.average.add(step_weight(config.ema, before, self.samples))
        self.progress.made(self.step)
        # ---- log
        self.folder.seen(self.step, batch.keys)
        terms |= {"gradient_norm": norm, "text_tokens": float(tokens.shape[1])}
        self.window.add(None if bad else terms | ({"clipped": (norm > clip).double()} if clip else {}))
        self._log(lr)
        # ---- save, evaluate; when stopped there may be no time for it, and the run that resumes does it
        if self.step == self.last or (config.save_every and self.step % config.save_every == 0):
            self.save()
        if self.stopping and self.step < self.last:
            return False
        return not self._evaluation_is_due() or self.evaluate(self.evaluators)

    def load(self) -> Batch | None:
        """This rank's next batch, or None if any rank was asked to stop; collective.

        So that a rank that waits for data learns of a stop on another one, all meet in rounds, every half second while
        waiting and at once with a batch, and leave in the same round: with a batch each, or with none."""
        try:
            self.progress.doing("waiting for data", self.stream.waiting_for)
            batch = self.stream.load(while_waiting=partial(self._meet, waiting=True))
            self.progress.doing("waiting for the data of another rank")
            while self._meet():
                pass
        except _Stopped:
            return None
        return batch

    def _meet(self, waiting: bool = False) -> bool:
        """One round of `load`: whether any rank waits; raises _Stopped on all ranks if any was asked to stop."""
        tally = self.stream.tally
        waiting, stops, *counts = distributed.sum_host([waiting, self.stop(), tally.read, tally.failed])
        self.stopping = stops > 0
        if self.stopping:
            raise _Stopped
        self.stream.check_failures(*counts, lambda: all_of(self.stream.failures))
        return waiting > 0

    def _log(self, lr: float) -> None:
        """Report the means since the last line every `log_every` steps; the first step has a line of its own."""
        due = self.step % self.config.log_every == 0 or self.step == self.last
        if due or self.step == self.first:
            values = self.window.read(self.config.batch_size, self.last - self.step)
            if self.step == self.first:
                values["first_step"] = time.perf_counter() - self.began
            if self.images_at_peak and "text_tokens" in values:
                values["mfu"] = values["images_per_second"] / self.images_at_peak(values["text_tokens"])
            self.folder.report(self.step, {"samples": self.samples, "lr": lr, "skipped": self.skipped, **values})
        if due:
            self.window.restart()

    def _collect_garbage(self) -> None:
        """Every so many steps, on all ranks at once: collections that Python starts when it has made many objects make
        all others wait for one rank. What is there after the first step is not looked through again."""
        if self.step == self.first or self.step % COLLECT_EVERY == 0:
            gc.disable()
            gc.collect()
            if self.step == self.first:
                gc.freeze()

    def save(self) -> None:
        """Start to write a checkpoint of this moment; collective."""
        self.progress.doing("saving")
        self.folder.save(self.engine, self.position, self.average)
        self.window.restart()

    @property
    def position(self) -> Position:
        return Position(self.step, self.samples, self.skipped)

    def _evaluation_is_due(self) -> bool:
        """True if this step crossed a multiple of `evaluate.every_samples`, or was the last one."""
        every, before = self.config.evaluate.every_samples, self.samples - self.config.batch_size
        crossed = every > 0 and self.samples // every > before // every
        return bool(self.evaluators) and (self.step == self.last or crossed)

    def evaluate(self, evaluators: Sequence[Evaluator]) -> bool:
        """Report their values, and keep the step if it is the best so far; collective. False if a stop was asked for
        meanwhile; the run that resumes makes the rest."""
        self.progress.doing("saving")
        self.folder.finish()  # evaluations fork data workers: no thread may be writing
        state, finished = random_state(), True
        # Other sizes and modes would be compiled, for minutes, to be used once.
        eager = torch.compiler.set_stance("force_eager") if self.config.engine.compile else nullcontext()
        with eager, self.average.in_place() if self.average else nullcontext():
            try:
                for evaluate in evaluators:
                    self.progress.doing("evaluating")
                    self.folder.report(self.step, {"samples": self.samples, **evaluate(self.engine, self._meet)})
            except _Stopped:  # caught here, as the weights must come back
                finished = False
        set_random_state(state)  # as in a run that was resumed from what has just been saved
        self.progress.doing("saving")
        self.folder.keep_best(self.engine, self.position, self.average)
        self.window.restart()
        return finished

    def _skip(self, report: dict) -> None:
        """Report a step with NaN or Inf of all ranks; collective. Raises UserError: the run is to stop there."""
        reports = all_of(report)
        where = self.folder.nonfinite(self.step, reports)
        stage = next(stage for stage in STAGES if any(other["stage"] == stage for other in reports))
        first = [other for other in reports if other["stage"] == stage]  # the ranks that are affected first
        keys = [key for other in first for key in other["keys"]]
        samples = ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")
        what = f"the {stage} is NaN or Inf on rank {', '.join(str(other['rank']) for other in first)}"
        if self.config.on_nonfinite == "stop" or self.skipped_in_a_row > MAX_SKIPPED:
            terms = ", ".join(f"{name} {value}" for name, value in first[0]["terms"].items())
            remedy = f"See {where} and these samples; lower optimizer.lr and --resume, or pass --on-nonfinite skip."
            what = f"At step {self.step} {what} ({terms}), for the samples {samples}; the step was skipped."
            raise UserError(what, remedy)
        self.skipped += 1
        if distributed.is_main():
            step = step_of(self.step, self.steps)
            print(f"{step} | skipped on all ranks: {what} ({samples}); see {where}", flush=True)


def loss_and_terms(objective, outputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective's part of this rank's rows, and detached scalars by name for the log; `outputs` of `Towers`."""
    *embeddings, scalars = outputs
    image, text, *masked = (Gaussian(*embeddings[i : i + 2]) for i in range(0, len(embeddings), 2))
    pairs = Pairs(image, text, *scalars.unbind(), tuple(masked) or None)
    out = objective(pairs)
    terms = {"loss": out.loss, **out.terms, **{name: getattr(pairs, name) for name in objective.scalars}}
    if objective.probabilistic:
        terms |= {"u_image": image.uncertainty().mean(), "u_text": text.uncertainty().mean()}
    return out.loss, {name: value.detach() for name, value in terms.items()}


STAGES = ("embedding", "loss", "gradient of the embedding", "gradient")  # of a step, in order


def nonfinite_report(
    keys: list[str], loss: Tensor, terms: dict, embeddings: Sequence[Tensor], gradients: Sequence, norm: Tensor
) -> dict:
    """This rank's first stage with NaN or Inf, before it spreads over all ranks' losses; keys of its samples; terms."""

    def bad_rows(tensors: Sequence[Tensor | None]) -> list[int]:  # of a scalar, all
        finite = [t.detach().expand(len(keys), -1).isfinite().all(1) for t in tensors if t is not None]
        return torch.stack(finite).logical_not().any(0).nonzero().flatten().tolist() if finite else []

    stages = zip(STAGES, map(bad_rows, (embeddings, [loss.reshape(1, 1)], gradients, [norm.reshape(1, 1)])))
    stage, bad = next((pair for pair in stages if pair[1]), ("", []))
    told = {name: f"{float(value):.4g}" for name, value in terms.items()}  # as text: JSON has no NaN
    return {"rank": distributed.rank(), "stage": stage, "keys": [keys[row] for row in bad], "terms": told}


def make_optimizer(model: DualEncoder, o: Optimizer) -> torch.optim.AdamW:
    """AdamW over the trained parameters, in groups by learning rate and weight decay; those that decay come first."""
    rates = layer_rates(model, o.layer_decay)
    groups: dict[tuple[bool, float], dict] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain, rate = no_weight_decay(name, parameter), rates[name]
            group = {"params": [], "weight_decay": 0.0 if plain else o.weight_decay, "multiplier": rate}
            groups.setdefault((plain, -rate), group)["params"].append(parameter)
    groups = [groups[key] for key in sorted(groups)]
    return torch.optim.AdamW(groups, lr=o.lr, betas=tuple(o.betas), eps=o.eps, fused=True)  # compiled it is no faster
