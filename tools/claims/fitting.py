"""Train with finetune's trainer and recipe: the same for every world."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from finetune.config import Config
from finetune.pair_feed import PairFeed
from finetune.recipe import make_optimizer, make_schedule
from finetune.trainer import Hooks, Joint, State, Trainer
from finetune.tuple_feed import TupleFeed
from probemb.models import DualEncoder, as_one


def fit_best(
    networks: Sequence[DualEncoder],
    method,
    config: Config,
    loader,
    validate: Callable[[], float] | None = None,
    feed: PairFeed | TupleFeed | None = None,
) -> list[float]:
    """Train in place; the networks end as they were after the epoch with the best validation, or else after the last.

    Args:
        method: finetune's, with its loss.
        loader: epochs of batches, as `finetune.loading.pair_loader.PairLoader`.
        validate: called after every epoch; more is better. None for no validation.
        feed: of composed queries; None for pairs.

    Returns:
        the validation after every epoch.
    """
    from accelerate import Accelerator

    model, best, values = as_one(networks), {}, []

    def end_epoch(epoch: int) -> None:
        if validate is None:
            return
        values.append(validate())
        if values[-1] == max(values):
            best.update(copy.deepcopy(model.state_dict()))

    state = State(Joint(networks[0], method, *networks[1:]), make_optimizer(config, networks, method))
    schedule = make_schedule(config, len(networks), loader.steps)
    accelerator, hooks = Accelerator(cpu=True), Hooks(end_epoch=end_epoch)
    feed = feed or PairFeed(config, loader.groups, accelerator.device, method.wants_words)
    Trainer(accelerator, state, loader, feed, schedule, config, hooks).fit()
    if best:
        model.load_state_dict(best)
    return values
