"""What all ranks learn together, so that none goes on alone: objects and failures."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from probemb import distributed
from probemb.errors import UserError


def all_of(mine: Any) -> list[Any]:
    """Every rank's object, in rank order; collective."""
    if distributed.world_size() == 1:
        return [mine]
    everyone = [None] * distributed.world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def agree(failure: Exception | None) -> None:
    """If any rank failed, all raise the first one's error; collective."""
    for error in all_of(failure):
        if error is not None:
            raise error


def same_everywhere(what: str, mine: str, remedy: str) -> None:
    """Refuse to go on where ranks see different things, as on a folder that is not shared; collective.

    Raises:
        UserError: on all ranks, with what rank 0 and the first other one see.
    """
    seen = all_of(mine)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(f"{what} is {seen[0]} for rank 0 and {other} for rank {rank}.", remedy)
