"""Zero-shot classes of the synthetic world, and the KEY.json of its samples."""

from collections.abc import Sequence

from probemb.data.scenes.predicates import Caption, predicate_from_json
from probemb.data.scenes.world import COLOURS, SHAPES, SIZES, Scene, Thing, scene_from_json, single_scene


def class_names() -> list[str]:
    """Names of the 64 kinds of objects, such as "red circle", which fit "a photo of a {}."."""
    return [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


def class_scene(seed: int | str, index: int) -> Scene:
    """Scene `index` of a balanced set of single-object scenes: its class is `index` modulo 64."""
    colour, shape = divmod(index % (len(COLOURS) * len(SHAPES)), len(SHAPES))
    return single_scene(seed, index, SHAPES[shape], COLOURS[colour])


def unseen_classes() -> list[int]:
    """Indices of the 16 classes that have no images in training; each colour and each shape is in two of them."""
    n = len(SHAPES)
    return [colour * n + shape for colour in range(len(COLOURS)) for shape in range(n) if (colour + shape) % 4 == 0]


def scene_of_split(seed: int | str, index: int, unseen: bool) -> Scene:
    """Scene `index` of a balanced set of single-object scenes, of the unseen classes or of all others."""
    held = set(unseen_classes())
    chosen = [label for label in range(len(COLOURS) * len(SHAPES)) if (label in held) == unseen]
    colour, shape = divmod(chosen[index % len(chosen)], len(SHAPES))
    return single_scene(seed, index, SHAPES[shape], COLOURS[colour])


def class_label(scene: Scene) -> int | None:
    """Index into `class_names()` of the scene's only object; None for scenes with several."""
    return kind_label(scene.things[0]) if len(scene.things) == 1 else None


def kind_label(thing: Thing) -> int:
    return COLOURS.index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)


def sized_class_names() -> list[str]:
    """Names of the 192 classes of zero-shot classification, such as "small red circle": every kind in three sizes."""
    return [f"{size} {kind}" for size in SIZES for kind in class_names()]


def sized_class_label(scene: Scene) -> int:
    """Index into `sized_class_names()` of the scene's only object."""
    (thing,) = scene.things
    return SIZES.index(thing.size) * len(class_names()) + kind_label(thing)


def sample_to_json(scene: Scene, captions: Sequence[Caption]) -> dict:
    """The KEY.json of an image: captions and their predicates, each object's index into `class_names()`, the scene."""
    return {
        "captions": [caption.text for caption in captions],
        "labels": [kind_label(thing) for thing in scene.things],
        "scene": scene.to_json(),
        "predicates": [caption.predicate.to_json() for caption in captions],
    }


def sample_from_json(row: dict) -> tuple[Scene, list[Caption]]:
    """Scene and captions of a KEY.json, from which `match_matrix` gives the true matches. Raises ValueError."""
    texts, predicates = row.get("captions"), row.get("predicates")
    if not isinstance(texts, list) or not isinstance(predicates, list) or len(texts) != len(predicates):
        raise ValueError("not a sample of the synthetic world: captions and predicates do not belong together")
    captions = [Caption(text, predicate_from_json(predicate)) for text, predicate in zip(texts, predicates)]
    return scene_from_json(row.get("scene", {})), captions
