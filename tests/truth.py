"""The meaning of a caption of the synthetic world, written out for one scene."""

import itertools

from probemb.data.scenes.predicates import Caption, Predicate
from probemb.data.scenes.world import CAMERA, RELATIONS, Scene


def matches(caption: Caption | Predicate, scene: Scene) -> bool:
    """True if the caption is true of the scene, object by object; independent of `match_matrix`."""
    stated = caption.predicate if isinstance(caption, Caption) else caption
    if any(getattr(stated, name) not in (None, getattr(scene, name)) for name in CAMERA):
        return False
    if stated.number:
        low, high = stated.number
        return low <= sum(map(stated.things[0].fits, scene.things)) <= high
    holds = RELATIONS.get(stated.relation)
    return any(
        all(pattern.fits(thing) for pattern, thing in zip(stated.things, chosen))
        and (holds is None or holds(chosen[0].cell, chosen[1].cell))
        for chosen in itertools.permutations(scene.things, len(stated.things))
    )
