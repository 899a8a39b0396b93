"""The DeepSpeed trainer: one engine, one step, one loop.

Letters: B items of this rank's share of the batch, W ranks, N = W B items of the global batch, D dimensions.

The towers run inside the engine; everything after them, from the Gaussians on, is float32 and outside it. With
accumulation the negatives stay the whole batch: embeddings are computed part by part without a graph, the loss gives
their gradients, and every part is recomputed from the same random state to propagate them (Gao et al., "Scaling deep
contrastive learning batch size under memory limited setup", 2021).

The host only queues a step: whether its loss and gradient are finite, its norm and its clipping stay on the device, and
what the hosts must agree on they tell each other beside it. The host reads a step's outcome when the next one is
queued, before that one may step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pretrain.config import Config
from pretrain.engine.average import Average
from pretrain.engine.nonfinite import Evidence, Flag, Queued, as_error
from pretrain.engine.randomness import random_state, set_random_state
from pretrain.engine.state import gradient_norm, step_unless
from pretrain.masking import draw_masks
from pretrain.objectives import OBJECTIVES, Pairs
from pretrain.profile import StepProfiler
from pretrain.schedules import learning_rate, set_learning_rate, step_weight
from pretrain.stream.stream import Batch, Stream
from probemb import Gaussian, distributed
from probemb.distributed import all_of
from probemb.runs.watchdog import Progress
from probemb.runs.window import Window

MAX_SKIPPED = 100  # steps in a row; more come from the weights, not the samples


class Forward(NamedTuple):
    """Both modalities' embeddings (B, D), the inverse temperature, a and b as (3,), and maybe masked copies (n, D)."""

    image: Gaussian
    text: Gaussian
    scalars: Tensor
    masked: tuple[Gaussian, Gaussian] | None = None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Forward:
        """Unpack the flat output of `Towers`."""
        *embeddings, scalars = tensors
        image, text, *masked = (Gaussian(*embeddings[i : i + 2]) for i in range(0, len(embeddings), 2))
        return cls(image, text, scalars, tuple(masked) or None)


class Recorder(Protocol):
    """Keeps a step's results: see `folder.RunFolder`."""

    failed: bool  # whether something could not be written, on this rank

    left_out: list[int]  # the numbers of the evaluations that the log lacks of the step that the run resumes from

    def check(self) -> None: ...
    def report(self, step: int, values: dict[str, float]) -> None: ...
    def seen(self, step: int, keys: list[str]) -> None: ...
    def nonfinite(self, step: int, reports: list[dict]) -> str: ...
    def save(self, engine, step: int, samples: int, skipped: int) -> None: ...
    def keep_best(self, engine, step: int, samples: int, skipped: int) -> None: ...
    def finish(self) -> None: ...


class Start(NamedTuple):
    """Steps done before, samples seen in them, and how many of the steps were skipped."""

    step: int = 0
    samples: int = 0
    skipped: int = 0


class Measured(NamedTuple):
    """Measures the speed of a run.

    images_at_peak  images/s at the devices' peak for a mean length of texts, for the MFU; None if unknown
    profiler        traces some of the steps
    """

    images_at_peak: Callable[[float], float] | None = None
    profiler: StepProfiler | None = None


class _Stopped(Exception):
    """The ranks have agreed to stop instead of taking another batch."""


class Trainer:
    """Trains an engine (`engine.engine.make_engine`) on the stream of this rank's batches.

    Args:
        steps: length of the whole run.
        start: where it starts, when resumed.
        recorder: writes results; None writes nothing.
        stop: whether this process was asked to stop; checked around every step and while waiting for data.
        progress: gets what is being done, for a `Watchdog`.
        measured: see `Measured`.
        average: of the engine's weights; follows them, and takes their place in evaluations.
    """

    def __init__(
        self,
        engine,
        stream: Stream,
        config: Config,
        device: torch.device,
        steps: int,
        start: Start = Start(),  # noqa: B008 (immutable)
        recorder: Recorder | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
        measured: Measured = Measured(),  # noqa: B008 (immutable)
        average: Average | None = None,
    ):
        self.engine, self.stream, self.config, self.device = engine, stream, config, device
        self.objective = OBJECTIVES[config.objective](config.loss)
        self.steps, self.step, self.samples, self.skipped = steps, *start  # samples: the position of the run
        self.total = self.samples + (steps - self.step) * config.batch_size
        self.recorder, self.stop, self.measured = recorder, stop, measured
        self.progress = progress or Progress(self.step)
        self.average = average
        self.stopping = False  # agreed by all ranks
        self._skipped_in_a_row = 0
        self._queued: Queued | None = None
        self._window: Window | None = None  # gets the terms of steps that were read

    def fit(self, evaluators: Sequence[Callable[..., dict[str, float]]] = ()) -> bool:
        """Train to the last step, to `stop_at_step`, or until `stop`; saves at the end.

        Args:
            evaluators: called every `evaluate.every_samples` and at the end, with what they call between batches; each
                one's values are reported. Those of the step that the run resumes from come first, if they were due and
                are not in the log.

        Returns:
            whether it was stopped before the last step and its evaluation; the same on all ranks.

        Raises:
            UserError: NaN or Inf with `on_nonfinite: stop`, or a checkpoint could not be written; on all ranks.
        """
        config, recorder, (images_at_peak, profiler) = self.config, self.recorder, self.measured
        last = max(self.step, min(self.steps, config.stop_at_step or self.steps))
        self._window = window = Window("images", lambda: self.stream.wait_seconds, self.device)
        whole = True
        if self.step and evaluators and self._crossed(config.evaluate.every_samples, last):
            whole = self._evaluate([evaluators[number] for number in recorder.left_out])
            window.restart()
        saved, first, began = self.step, self.step + 1, time.perf_counter()
        while self.step < last and whole:
            if profiler:
                profiler.begin(self.step + 1)
            batch = self._load()  # ------------------------------------------------------------- load, agree
            if batch is None:
                break
            self.progress.doing("computing")
            images = batch.images.to(self.device, non_blocking=True)
            tokens = self._tokens(batch.tokens)
            lr = learning_rate(config.optimizer, self.samples + config.batch_size, self.total)
            set_learning_rate(self.engine.optimizer, lr)
            self.queue_step(images, tokens, batch.keys)  # ------------------- forward, loss, backward, agree, step
            self.step += 1
            self.samples += config.batch_size
            self.progress.made(self.step)
            if profiler:
                profiler.end(self.step)
            recorder.seen(self.step, batch.keys)
            due = config.save_every and self.step % config.save_every == 0
            logging = self.step % config.log_every == 0 or self.step in (first, last)
            evaluating = evaluators and self._crossed(config.evaluate.every_samples, last)
            if logging or due or evaluating:
                self.read_outcome()
            if logging:  # ---------------------------------------------------------------------------------------- log
                values = window.read(config.batch_size, last - self.step)
                if self.step == first:
                    values["first_step"] = time.perf_counter() - began
                if images_at_peak and "text_tokens" in values:
                    values["mfu"] = values["images_per_second"] / images_at_peak(values["text_tokens"])
                recorder.report(self.step, {"samples": self.samples, "lr": lr, "skipped": self.skipped, **values})
            if self.step % config.log_every == 0 or self.step == last:  # the first line is one more
                window.restart()
            if self.step == last or due:  # ------------------------------------------------------------------ save
                self.progress.doing("saving")
                recorder.save(self.engine, self.step, self.samples, self.skipped)
                saved = self.step
                window.restart()
            if self.stopping and self.step < last:
                break  # there may be no time for an evaluation; the run that resumes makes it
            if evaluating:  # ---------------------------------------------------------------------------- evaluate
                whole = self._evaluate(evaluators)
                window.restart()
        self.progress.doing("saving")
        self.read_outcome()
        if self.stopping and self.step > saved:  # ----------------------------------------------- save, when stopped
            recorder.save(self.engine, self.step, self.samples, self.skipped)
        return self.stopping and (self.step < last or not whole)

    def _evaluate(self, evaluators: Sequence[Callable[..., dict[str, float]]]) -> bool:
        """Report their values, and keep the step if it is the best so far; False if a stop was asked for meanwhile, and
        the run that resumes makes the rest; collective.
        """
        self.progress.doing("saving")
        self.recorder.finish()  # evaluations fork data workers: no thread may be writing
        state, whole = random_state(), True
        with self.average.in_place() if self.average else nullcontext():
            for evaluate in evaluators:
                self.progress.doing("evaluating")
                try:
                    values = evaluate(partial(self._meet, waiting=False))
                except _Stopped:  # caught here, as the weights must come back
                    whole = False
                    break
                self.recorder.report(self.step, {"samples": self.samples, **values})
        set_random_state(state)  # as in a run that was resumed from what has just been saved
        self.progress.doing("saving")
        self.recorder.keep_best(self.engine, self.step, self.samples, self.skipped)
        return whole

    def _load(self) -> Batch | None:
        """This rank's next batch, or None if any rank was asked to stop; collective.

        A rank that waited alone for data would not learn of a stop on another rank. So all ranks meet in rounds and
        share whether they still wait, every half second while waiting and at once with a batch. All leave in the same
        round, either with a batch each or with none; batches loaded by then are dropped, and the position stays. The
        wait has no limit but the watchdog's.
        """
        try:
            self.progress.doing("waiting for data", self.stream.waiting_for)
            batch = self.stream.load(while_waiting=partial(self._meet, waiting=True))
            self.progress.doing("waiting for the data of another rank")
            while self._meet(waiting=False):
                pass
        except _Stopped:
            return None
        return batch

    def _meet(self, waiting: bool) -> bool:
        """One round of `_load`: whether any rank waits; collective.

        Raises _Stopped on all ranks, and UserError: too many of the samples of all ranks cannot be used.
        """
        tally = self.stream.tally
        waiting, stops, *counts = distributed.sum_host([waiting, self.stop(), tally.read, tally.failed])
        self.stopping = stops > 0
        if self.stopping:
            raise _Stopped
        self.stream.judge(*counts, lambda: all_of(self.stream.failures))
        return waiting > 0

    def _tokens(self, tokens: Tensor) -> Tensor:
        """On the device, without unused padding, except for compiled towers, which need one shape."""
        if self.config.engine.compile:
            return tokens.to(self.device, non_blocking=True)
        return self.engine.module.model.cut_padding(tokens, self.device)

    def _crossed(self, every: int, last: int) -> bool:
        """True if this step crossed a multiple of `every` samples, or was the last one."""
        before = self.samples - self.config.batch_size
        return self.step == last or (every > 0 and self.samples // every > before // every)

    def train_step(
        self, images: Tensor, tokens: Tensor, keys: list[str] | None = None
    ) -> dict[str, Tensor | float] | None:
        """`queue_step`, and its outcome: scalars without gradient, or None if all ranks skipped it."""
        self.queue_step(images, tokens, keys)
        return self.read_outcome()

    def queue_step(self, images: Tensor, tokens: Tensor, keys: list[str] | None = None) -> None:
        """One optimizer step on this rank's (B, 3, H, W) images and (B, L) tokens, named by `keys`; collective.

        Raises:
            UserError: see `read_outcome`, of the step before.
        """
        parts = self.config.engine.accumulation
        masks = draw_masks(self.config, self.engine.module.model, images, tokens, self.samples)
        if parts == 1:
            flat = self.engine(images, tokens, *masks)
            for embedding in flat[:4]:
                if embedding.requires_grad:  # not the log-variances of a point model
                    embedding.retain_grad()  # to trace a NaN to its sample
            loss, terms = self.loss(Forward.of(flat))
            self.engine.backward(loss)
            embeddings, grads = flat[:4], [e.grad for e in flat[:4]]
            self._finish_step(Evidence(loss, terms, embeddings, grads, gradient_norm(self.engine)), tokens, keys)
            return

        cached, states = [], []
        chunks = [(i, t, *m) for i, t, m in zip(images.chunk(parts), tokens.chunk(parts), masks.chunk(parts))]
        with torch.no_grad():
            for chunk in chunks:
                states.append(random_state())
                cached.append(self.engine(*chunk))
        *embeddings, scalars = zip(*cached)
        leaves = [torch.cat(e).requires_grad_() for e in embeddings] + [scalars[0].clone().requires_grad_()]
        loss, terms = self.loss(Forward.of(tuple(leaves)))
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        after = random_state()  # the loss may draw, too
        slices = zip(*(g.chunk(parts) for g in grads[:-1]))
        for part, (chunk, state, slice_grads) in enumerate(zip(chunks, states, slices), 1):
            set_random_state(state)
            *embeddings, scalars = self.engine(*chunk)
            carried = sum((e * g).sum() for e, g in zip(embeddings, slice_grads))
            # The engine divides by the number of parts; every part has the scalars' whole gradient.
            self.engine.backward(parts * carried + (scalars * grads[-1]).sum())
            if part < parts:
                self.engine.step()  # only counts the part
        set_random_state(after)
        self._finish_step(Evidence(loss, terms, leaves[:4], list(grads[:4]), gradient_norm(self.engine)), tokens, keys)

    def _finish_step(self, evidence: Evidence, tokens: Tensor, keys: list[str] | None) -> None:
        """Step, if all ranks can; what the hosts must agree on and what the devices must are one collective each."""
        failed = self.recorder.failed if self.recorder else False
        self.stopping, failed = distributed.any_host([self.stop(), failed])
        if failed:
            self.recorder.check()
        nonfinite, squares = distributed.any_rank_and_sum(evidence.nonfinite(), evidence.gradient_norm.square())
        self.read_outcome()
        # Without ZeRO every rank has the whole gradient.
        norm = (squares / (1 if self.config.engine.zero_stage else distributed.world_size())).sqrt()
        longest = self.config.optimizer.clip_grad_norm
        step_unless(self.engine, nonfinite, norm, longest)
        terms = {**evidence.terms, "gradient_norm": norm, "text_tokens": float(tokens.shape[1])}
        if longest:
            terms["clipped"] = (norm > longest).double()
        outcome = evidence.detached(), terms, Flag(nonfinite)
        self._queued = Queued(self.step + 1, self.samples, keys or [], *outcome)

    def read_outcome(self) -> dict[str, Tensor | float] | None:
        """The scalars of the step that was queued last, once; None if all ranks have skipped it; collective.

        Raises:
            UserError: it is NaN or Inf, and `on_nonfinite` is stop, or too many were before; on all ranks.
        """
        queued, self._queued = self._queued, None
        if queued is None:
            return None
        if queued.skipped.read():
            self._report_skipped(queued)
            terms = None
        else:
            self._skipped_in_a_row, terms = 0, queued.terms
            if self.average:  # of weights that no later step has changed
                after = queued.samples + self.config.batch_size
                self.average.add(step_weight(self.config.ema, queued.samples, after))
        if self._window:
            self._window.add(terms)
        return terms

    def _report_skipped(self, queued: Queued) -> None:
        reports = all_of(queued.evidence.report(distributed.rank(), queued.keys))
        where = self.recorder.nonfinite(queued.step, reports) if self.recorder else "the log"
        self._skipped_in_a_row += 1
        if self.config.on_nonfinite == "stop" or self._skipped_in_a_row > MAX_SKIPPED:
            raise as_error(queued.step, reports, where)
        self.skipped += 1

    def loss(self, out: Forward) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's part of this rank's rows, and what is logged."""
        pairs = Pairs(out.image, out.text, *out.scalars.unbind(), out.masked)
        found = self.objective(pairs)
        terms = {"loss": found.loss, **found.terms}
        terms |= {name: getattr(pairs, name) for name in self.objective.scalars}
        if self.objective.probabilistic:
            terms |= {"u_image": out.image.uncertainty().mean(), "u_text": out.text.uncertainty().mean()}
        return found.loss, {name: value.detach() for name, value in terms.items()}
