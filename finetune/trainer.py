"""The finetuning loop, from top to bottom; accelerate does the distribution (DDP).

Every rank embeds its own pairs; embeddings and labels of all ranks are gathered with gradient, and every rank computes
the loss of the whole batch. DDP's mean of the gradients is then that of one process on the whole batch, for any loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from finetune.augment import Mix, draw_mix, mix_images, size_augment_text
from finetune.config import Config
from finetune.methods import Batch, Method
from finetune.pairs import PairLoader
from finetune.recipe import Schedule, WeightAverage, freeze_image_backbone, set_learning_rates
from probemb import distributed, labels
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.models import ProbabilisticCLIP
from probemb.models.pooling import size_augment_mask

_TEXT, _IMAGE, _MIX, _LOSS = range(4)  # what a random number is for


class Joint(nn.Module):
    """Model and method as the one module that DDP wraps: all of their gradients belong to one backward pass."""

    def __init__(self, model: ProbabilisticCLIP, method: Method):
        super().__init__()
        self.model, self.method = model, method

    def forward(self, images: Tensor, tokens: Tensor, image_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Means and log-variances of images and texts, (b, D) each."""
        image, text = self.model.encode_image(images, image_mask), self.model.encode_text(tokens)
        return image.mean, image.log_var, text.mean, text.log_var


class Trainer:
    """Runs epochs.

    Args:
        accelerator: accelerate's; it has the device and the precision.
        joint: on the device.
        optimizer: of `recipe.create_optimizer`.
        epoch, step_in_epoch: where to go on.
        average: SWA's, or None.
        tell: gets (step, values) at every log step and after every validation.
        end_epoch: called after every epoch with the number of epochs that are done.
        stop: whether this process was asked to stop.
    """

    def __init__(
        self,
        accelerator,
        joint: Joint,
        optimizer: torch.optim.Optimizer,
        loader: PairLoader,
        schedule: Schedule,
        config: Config,
        *,
        epoch: int = 0,
        step_in_epoch: int = 0,
        average: WeightAverage | None = None,
        tell: Callable[[int, dict], object] = lambda step, values: None,
        end_epoch: Callable[[int], object] = lambda epoch: None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.accelerator, self.joint, self.optimizer, self.loader = accelerator, joint, optimizer, loader
        self.schedule, self.config, self.average = schedule, config, average
        self.epoch, self.step_in_epoch = epoch, step_in_epoch
        self.tell, self.end_epoch, self.stop = tell, end_epoch, stop
        self.device = accelerator.device
        self.stopping = False

    @property
    def step(self) -> int:
        """Steps done since the start of the run."""
        return self.epoch * self.loader.steps + self.step_in_epoch

    def fit(self) -> bool:
        """Train to the end; returns whether it was asked to stop before, having finished its step."""
        last = min(self.config.epochs, self.config.stop_after_epochs or self.config.epochs)
        self.wrapped = None
        while self.epoch < last:
            changed = freeze_image_backbone(self.joint.model, self.schedule.frozen(self.epoch))
            if changed or self.wrapped is None:  # DDP looks at requires_grad once, when it wraps
                self.wrapped = self._wrap()
            if self.step_in_epoch == 0:
                self.joint.method.begin_epoch(self.epoch)
            self._train_epoch()
            if self.stopping:
                return True
            if self.average and self.schedule.averages(self.epoch):
                self.average.update(self.joint.model, self.joint.method)
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
            self.end_epoch(self.epoch)
        return False

    def _wrap(self) -> nn.Module:
        for name in ("forward", "_original_forward"):  # what accelerate hung on it for autocast the last time
            self.joint.__dict__.pop(name, None)
        return self.accelerator.prepare_model(self.joint)

    def _train_epoch(self) -> None:
        config, steps = self.config, self.loader.steps
        window = _Window(self.loader)
        for pairs in self.loader.epoch(self.epoch, self.step_in_epoch):
            # ------------------------------------------------------------------------------------------- load, augment
            images, tokens, mask, mix = self._augment(pairs)
            # ----------------------------------------------------------------------------------------------- forward
            embedded = self.wrapped(images, tokens, mask)
            batch = self._gather(embedded, pairs, mix)
            # -------------------------------------------------------------------------------------------------- loss
            out: LossOutput = self.joint.method(batch, self.joint.model)
            self._refuse_nonfinite(out)
            # -------------------------------------------------------------------------------------- backward and step
            self.optimizer.zero_grad(set_to_none=True)
            self.accelerator.backward(out.loss)
            if config.optimizer.clip_grad_norm:
                norm = self.accelerator.clip_grad_norm_(self.joint.parameters(), config.optimizer.clip_grad_norm)
                out.terms["gradient_norm"] = norm.detach()
            set_learning_rates(self.optimizer, self.schedule, self.epoch, (self.step_in_epoch + 1) / steps)
            self.optimizer.step()
            self.step_in_epoch += 1
            # --------------------------------------------------------------------------------------------------- log
            window.add({"loss": out.loss.detach(), **out.terms, **self._scalars(batch)})
            if self.step % config.log_every == 0 or self.step_in_epoch == steps:
                left = config.epochs * steps - self.step
                values = window.close(config.batch_size, left)
                self.tell(self.step, {"epoch": self.step / steps, **values, "lr": self._head_lr()})
            (self.stopping,) = distributed.any_rank([self.stop()], self.device)
            if self.stopping and self.step_in_epoch < steps:
                return
        self.stopping = False  # a whole epoch is finished as one; the signal is looked at again in the next

    def _augment(self, pairs) -> tuple[Tensor, Tensor, Tensor | None, Mix | None]:
        config, rank = self.config, distributed.rank()
        images = pairs.images.to(self.device, non_blocking=True)
        tokens, mask, mix = pairs.tokens, None, None
        if config.mix.ratio:
            rng = np.random.default_rng([config.seed, self.step, rank, _MIX])
            mix = draw_mix(
                len(images), *images.shape[-2:], rng, config.mix.ratio, config.mix.mixup, config.mix.cutmix,
                config.mix.switch,
            )  # fmt: skip
            images = mix_images(images, mix)
        if config.size_augment:
            tokens = size_augment_text(tokens, config.size_augment, generator=self._generator(_TEXT, rank))
            mask = size_augment_mask(
                len(images), self._image_tokens(), config.size_augment, self._generator(_IMAGE, rank)
            ).to(self.device, non_blocking=True)
        tokens = self.joint.model.cut_padding(tokens)
        return images, tokens.to(self.device, non_blocking=True), mask, mix

    def _image_tokens(self) -> int:
        return self.joint.model.visual.positional_embedding.shape[0]

    def _generator(self, what: int, rank: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
        seed = np.random.SeedSequence([self.config.seed, self.step, rank, what]).generate_state(2, np.uint32)
        return torch.Generator(device).manual_seed(int(seed[0]) << 31 | int(seed[1]) >> 1)

    def _gather(self, embedded: tuple[Tensor, ...], pairs, mix: Mix | None) -> Batch:
        """The pairs of all ranks, with gradient; labels from the images' numbers and what was mixed with what."""
        n = len(pairs.image_index)
        mean_i, log_var_i, mean_t, log_var_t = (e.float() for e in embedded)
        image, text = distributed.gather_pairs(Gaussian(mean_i, log_var_i), Gaussian(mean_t, log_var_t))
        numbers = torch.stack([pairs.image_index, pairs.pair_index], 1).to(self.device)
        numbers = distributed.gather(numbers)
        match = labels.same_image(numbers[:, 0], numbers[:, 0])
        if mix is not None:
            row = torch.stack([mix.lam.double(), (mix.partner + distributed.rank() * n).double()], 1).to(self.device)
            lam, partner = distributed.gather(row).unbind(1)
            match = labels.mixed(match, lam.float(), partner.long())
        match = labels.smooth(match, self.config.mix.smoothing)
        numbers = numbers.cpu()
        generator = self._generator(_LOSS, device=self.device)
        return Batch(image, text, match, numbers[:, 0], numbers[:, 1], self.epoch, self.step, generator)

    def _refuse_nonfinite(self, out: LossOutput) -> None:
        # The loss is that of the whole batch, so that all ranks see the same.
        if not out.loss.isfinite():
            terms = ", ".join(f"{name} {float(value):.4g}" for name, value in out.terms.items())
            raise UserError(
                f"At step {self.step + 1} the loss is NaN or Inf ({terms}); nothing was stepped.",
                "Lower optimizer.lr, and go on from the last epoch with --resume.",
            )

    @torch.no_grad()
    def _scalars(self, batch: Batch) -> dict[str, Tensor]:
        model, method = self.joint.model, self.joint.method
        values = {name: getattr(model, name).detach().reshape(()).clone() for name in method.trains}
        if method.probabilistic:
            values |= {"u_image": batch.image.uncertainty().mean(), "u_text": batch.text.uncertainty().mean()}
        return values

    def _head_lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)


class _Window:
    """Means over the steps between two log lines; scalars stay on the device until then."""

    def __init__(self, loader: PairLoader):
        self.loader = loader
        self._restart()

    def _restart(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.n, self.began, self.waited = 0, time.perf_counter(), self.loader.waited

    def add(self, terms: dict[str, Tensor]) -> None:
        self.n += 1
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0) + 1

    def close(self, batch_size: int, steps_left: int) -> dict[str, float]:
        """Means, pairs a second over all ranks, share of time waiting for data, seconds to the end."""
        values = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        seconds = time.perf_counter() - self.began
        values |= {
            "data_wait": (self.loader.waited - self.waited) / seconds,
            "pairs_per_second": self.n * batch_size / seconds,
            "eta": steps_left * seconds / self.n,
        }
        self._restart()
        return values
