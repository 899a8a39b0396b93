"""The embedded world, "scenes": images drawn on the fly whose captions, matches and classes have a known truth.

A scene has one to three objects with shape, colour, size and place, and camera settings (photo or drawing, light,
focus). Its captions go from exact ("a dark photo of a large red circle left of a small blue square") to vague ("two
shapes").
Each caption carries what it states as a predicate, so that which captions fit which images, and how large a share of
all images a caption fits, are computed exactly: there are no false negatives, and a learned uncertainty can be
compared with the true one. `scene_predicates.py` says what words mean, `scene_world.py` how often things occur.
"""

from __future__ import annotations

from collections.abc import Sequence

from probemb.data.scenes.captions import draw_captions
from probemb.data.scenes.drawing import render
from probemb.data.scenes.predicates import (
    Caption,
    Pattern,
    Predicate,
    ambiguity,
    match_matrix,
    matches,
    predicate_from_json,
)
from probemb.data.scenes.world import COLOURS, SHAPES, Scene, Thing, scene, scene_from_json, single_scene
from probemb.errors import UserError, nearest

__all__ = [
    "CLASS_KINDS",
    "COLOURS",
    "SHAPES",
    "Caption",
    "Pattern",
    "Predicate",
    "Scene",
    "Thing",
    "ambiguity",
    "class_caption",
    "class_label",
    "class_names",
    "class_scene",
    "draw_captions",
    "match_matrix",
    "matches",
    "predicate_from_json",
    "render",
    "sample_from_json",
    "sample_to_json",
    "scene",
    "scene_from_json",
    "single_scene",
]

CLASS_KINDS = ("colour-shape", "shape", "colour")


def _classes(kind: str) -> list[Pattern]:
    if kind == "colour-shape":
        return [Pattern(shape, colour) for colour in COLOURS for shape in SHAPES]
    if kind == "shape":
        return [Pattern(shape=shape) for shape in SHAPES]
    if kind == "colour":
        return [Pattern(colour=colour) for colour in COLOURS]
    raise UserError(
        f"There is no kind of class {kind!r}.{nearest(kind, CLASS_KINDS)}", f"Use {', '.join(CLASS_KINDS)}."
    )


def _name(pattern: Pattern) -> str:
    return " ".join(filter(None, (pattern.colour, pattern.shape or "shape")))


def class_names(kind: str = "colour-shape") -> list[str]:
    """Names of the zero-shot classes, such as "red circle", "circle" or "red shape", that fit "a photo of a {}."."""
    return [_name(pattern) for pattern in _classes(kind)]


def class_label(scene: Scene, kind: str = "colour-shape") -> int | None:
    """Index into `class_names(kind)` of the scene's only object; None for scenes with more than one."""
    if len(scene.things) != 1:
        return None
    return next(label for label, pattern in enumerate(_classes(kind)) if pattern.fits(scene.things[0]))


def class_scene(seed: int | str, index: int, kind: str = "colour-shape") -> Scene:
    """Scene `index` of a balanced set of single-object scenes: its class is `index` modulo the number of classes."""
    classes = _classes(kind)
    pattern = classes[index % len(classes)]
    return single_scene(seed, index, pattern.shape, pattern.colour)


def sample_to_json(scene: Scene, captions: Sequence[Caption]) -> dict:
    """The KEY.json of an image: captions, each object's index into `class_names()`, the scene, what captions state."""
    labels = [COLOURS.index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape) for thing in scene.things]
    return {
        "captions": [caption.text for caption in captions],
        "labels": labels,
        "scene": scene.to_json(),
        "predicates": [caption.predicate.to_json() for caption in captions],
    }


def sample_from_json(row: dict) -> tuple[Scene, list[Caption]]:
    """Scene and captions of a KEY.json, from which `match_matrix` gives the true matches. Raises ValueError."""
    texts, predicates = row.get("captions"), row.get("predicates")
    if not isinstance(texts, list) or not isinstance(predicates, list) or len(texts) != len(predicates):
        raise ValueError("not a sample of the embedded world: captions and predicates do not belong together")
    captions = [Caption(text, predicate_from_json(predicate)) for text, predicate in zip(texts, predicates)]
    return scene_from_json(row.get("scene", {})), captions


def class_caption(label: int, kind: str = "colour-shape") -> Caption:
    """The class as a caption: true of every image that shows at least one such object."""
    pattern = _classes(kind)[label]
    name = _name(pattern)
    return Caption(f"{'an' if name[0] in 'aeiou' else 'a'} {name}", Predicate((pattern,)))
