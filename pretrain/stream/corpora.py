"""The corpora of a stream: their order, and names of their shards."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pretrain.stream.order import Order
from pretrain.stream.selection import Selection
from pretrain.stream.settings import Settings
from probemb.data.shards.index import Shard, repeated
from probemb.errors import UserError


class Corpus(NamedTuple):
    """Shards that belong together in a mixture, and how often an epoch goes through them (see `Order`)."""

    shards: Sequence[Shard]
    weight: float = 1.0


def labels_of(shards: Sequence[Shard]) -> list[str]:
    """Readable names of the shards: the file name, or the whole path where several shards share it."""
    counts = Counter(shard.name for shard in shards)
    return [shard.name if counts[shard.name] == 1 else str(shard.path) for shard in shards]


def refuse_repeats(shards: Sequence[Shard]) -> None:
    """Raise UserError if a shard is named twice."""
    if twice := repeated(shards):
        raise UserError(
            f"The shard {twice[0]} is named {twice[1]} times.",
            "Name every shard once, and say with data.weights what is to be seen more often.",
        )


def make_order(corpora: Sequence[Corpus], settings: Settings, selection: Selection | None) -> Order:
    """The order of all samples, or of the selected ones."""
    return Order(
        selection.sizes if selection else [shard.samples for corpus in corpora for shard in corpus.shards],
        batch_size=settings.batch_size,
        lanes=settings.lanes,
        window=settings.window,
        seed=settings.seed,
        corpus=[number for number, corpus in enumerate(corpora) for _ in corpus.shards],
        weights=[corpus.weight for corpus in corpora],
        places=selection.places if selection else None,
    )


def refuse_uneven_shares(lanes: int, world_size: int) -> None:
    """Raise UserError if the ranks cannot have as many lanes each."""
    if lanes % world_size == 0:
        return
    *fewer, most = (n for n in range(1, lanes + 1) if lanes % n == 0)
    fits = f"{', '.join(map(str, fewer))} or {most}" if fewer else str(most)
    raise UserError(
        f"{world_size} processes cannot share the data's {lanes} lanes evenly.",
        f"Start {fits} processes, or start a new run with lanes that {world_size} divides.",
    )
