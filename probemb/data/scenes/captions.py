"""True captions of a scene, from exact to vague, in plain words and in the style of zero-shot prompts.

Words of zero-shot prompts such as "dark", "blurry", "pixelated", "drawing", "large", "close-up" and "one" are true or
false of a scene here, so that a prompt that states something rare fits few images. "good", "nice", "cool" and "picture"
state nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from probemb.data.scenes.predicates import Caption, Mention, Pattern, Predicate
from probemb.data.scenes.world import MAX_OBJECTS, PLACES, RELATIONS, Scene, Thing, pick

LEVELS = 5  # 0 exact ... 4 vague

_NUMBERS = {1: "one", 2: "two", 3: "three"}
_PLACE_WORDS = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
_PLACE_WORDS["middle"] = "in the middle"
_CAMERA_WORDS = {
    "photo": ("photo",),
    "drawing": ("drawing", "sketch", "doodle"),
    None: ("picture", "image"),  # of any medium
    "dark": ("dark",),
    "bright": ("bright",),
    "blurry": ("blurry",),
    "pixelated": ("pixelated", "low resolution"),
}
_EMPTY_WORDS = ("good", "nice", "cool")
_SIZE_WORDS = {"small": ("small",), "large": ("large", "large", "big"), "huge": ("huge",)}


def draw_captions(scene: Scene, count: int = LEVELS) -> list[Caption]:
    """`count` true captions of the scene, from exact to vague; a pure function of the scene."""
    draw = random.Random(f"captions {scene.seed}")
    writers = (_exact, _without_sizes, _one_object, _one_attribute, _vague)
    levels = [round(i * (LEVELS - 1) / max(count - 1, 1)) for i in range(count)]
    return [writers[level](scene, draw) for level in levels]


def _exact(scene: Scene, draw: random.Random) -> Caption:
    """Every object with shape, colour and size; their relation; the camera settings."""
    things = _shuffled(scene.things, draw)
    patterns = [Pattern(thing.shape, thing.colour, thing.size) for thing in things]
    camera = _true_camera(scene, draw, 0.7, 0.7)
    return _write_list(things, patterns, camera, draw, place=0.6, relation=1.0)


def _without_sizes(scene: Scene, draw: random.Random) -> Caption:
    """Every object with shape and colour; sometimes their relation."""
    things = _shuffled(scene.things, draw)
    patterns = [Pattern(thing.shape, thing.colour) for thing in things]
    camera = _true_camera(scene, draw, 0.4, 0.3)
    return _write_list(things, patterns, camera, draw, place=0.4, relation=0.5)


def _one_object(scene: Scene, draw: random.Random) -> Caption:
    """Shape and colour of one object, often as a prompt."""
    thing = pick(draw, scene.things)
    pattern = Pattern(thing.shape, thing.colour, thing.size if draw.random() < 0.25 else None)
    camera = _true_camera(scene, draw, 0.6, 0.4)
    if draw.random() < 0.1 and sum(map(pattern.fits, scene.things)) == 1:
        return _write_number(scene, pattern, camera, draw)
    return _write_list([thing], [pattern], camera, draw)


def _one_attribute(scene: Scene, draw: random.Random) -> Caption:
    """A shape, a colour or a size alone; two objects by one attribute each; several objects of one kind."""
    chosen = _shuffled(scene.things, draw)[:2]
    camera = _true_camera(scene, draw, 0.3, 0.2)
    by_shape = draw.random() < 0.5
    patterns = [Pattern(shape=thing.shape) if by_shape else Pattern(colour=thing.colour) for thing in chosen]
    if len(chosen) == 2 and draw.random() < 0.5:
        if patterns[0] == patterns[1] or draw.random() < 0.25:
            return _write_number(scene, patterns[0], camera, draw)
        return _write_list(chosen, patterns, camera, draw, relation=0.5)
    if draw.random() < 0.3:
        patterns[0] = Pattern(patterns[0].shape, patterns[0].colour, chosen[0].size)
    return _write_list(chosen[:1], patterns[:1], camera, draw, place=0.2)


def _vague(scene: Scene, draw: random.Random) -> Caption:
    """Only the number of objects, one unnamed object, or only the camera settings."""
    kind = draw.random()
    if kind < 0.55:
        return _write_number(scene, Pattern(), _true_camera(scene, draw, 0.3, 0.2), draw)
    if kind < 0.75:
        thing = pick(draw, scene.things)
        return _write_list([thing], [Pattern()], _true_camera(scene, draw, 0.4, 0.3), draw, place=0.3)
    camera = _true_camera(scene, draw, 1.0, 0.6)
    text = _camera_words(camera, draw)
    return Caption(text, Predicate(**camera), (Mention(0, len(text)),))


def _write_list(
    things: Sequence[Thing], patterns: Sequence[Pattern], camera: dict[str, str], draw: random.Random,
    place: float = 0.0, relation: float = 0.0,
) -> Caption:  # fmt: skip
    """The objects by their patterns. place, relation: odds of stating a single one's place, the relation of two."""
    patterns, stated = list(patterns), None
    if len(things) == 1 and draw.random() < place:
        where = pick(draw, [name for name, cells in PLACES.items() if things[0].cell in cells])
        patterns[0] = replace(patterns[0], place=where)
    elif len(things) > 1 and draw.random() < relation:
        stated = pick(draw, [name for name, holds in RELATIONS.items() if holds(things[0].cell, things[1].cell)])
    predicate = Predicate(tuple(patterns), stated, **camera)
    adjectives, article = (), None
    prompt = bool(camera) or draw.random() < 0.15
    if prompt and len(patterns) == 1:
        if patterns[0].size == "huge":  # stated by the camera's words instead
            adjectives, patterns[0] = ("close-up",), replace(patterns[0], size=None)
        article = "the" if draw.random() < 0.3 else None
    names = [_noun_phrase(pattern, draw, article) for pattern in patterns]
    if stated:
        text = f"{names[0]} {stated} {names[1]}" + "".join(f", and {name}" for name in names[2:])
    else:
        text = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    meant = [(name, (thing,), pattern) for name, thing, pattern in zip(names, things, patterns)]
    return _finish(text, predicate, meant, prompt, camera, draw, adjectives)


def _write_number(scene: Scene, pattern: Pattern, camera: dict[str, str], draw: random.Random) -> Caption:
    """The number of objects that fit the pattern: exact, or "several"."""
    count = sum(map(pattern.fits, scene.things))
    several = count > 1 and draw.random() < 0.25
    number = (2, MAX_OBJECTS) if several else (count, count)
    text = _noun_phrase(pattern, draw, "several" if several else _NUMBERS[count])
    prompt = bool(camera) or draw.random() < 0.15
    predicate = Predicate((pattern,), number=number, **camera)
    meant = [(text, tuple(filter(pattern.fits, scene.things)), pattern)]
    return _finish(text, predicate, meant, prompt, camera, draw)


def _noun_phrase(pattern: Pattern, draw: random.Random, determiner: str | None = None) -> str:
    """ "a small red circle at the top"; a number as determiner makes the plural."""
    words = [pick(draw, _SIZE_WORDS[pattern.size])] if pattern.size else []
    words += [pattern.colour] if pattern.colour else []
    noun = pattern.shape or pick(draw, ("shape", "shape", "object"))
    if determiner not in (None, "the", "one"):
        noun += "es" if noun == "cross" else "s"
    words.append(noun)
    words.insert(0, determiner or _article(words[0]))
    if pattern.place:
        words.append(_PLACE_WORDS[pattern.place])
    return " ".join(words)


def _true_camera(scene: Scene, draw: random.Random, medium: float, setting: float) -> dict[str, str]:
    """Some of the scene's camera settings, with these odds; light and focus only where they are special."""
    chances = {"medium": medium, "light": setting, "focus": setting}
    chosen = {name: getattr(scene, name) for name, chance in chances.items() if draw.random() < chance}
    return {name: value for name, value in chosen.items() if value not in ("normal", "sharp")}


def _camera_words(camera: dict[str, str], draw: random.Random, adjectives: Sequence[str] = ()) -> str:
    """ "a dark blurry photo"; without a medium "a dark picture"."""
    words = [pick(draw, _CAMERA_WORDS[camera[name]]) for name in ("light", "focus") if name in camera]
    if not words and draw.random() < 0.15:
        words = [pick(draw, _EMPTY_WORDS)]
    words = [*words, *adjectives, pick(draw, _CAMERA_WORDS[camera.get("medium")])]
    return f"{_article(words[0])} {' '.join(words)}"


def _finish(
    text: str, predicate: Predicate, meant: Sequence[tuple[str, tuple[Thing, ...], Pattern]], prompt: bool,
    camera: dict[str, str], draw: random.Random, adjectives: Sequence[str] = (),
) -> Caption:  # fmt: skip
    """The caption, after the camera's words if it is a prompt; sometimes with a full stop.

    meant: the noun phrases of the text in order, each with its objects and what it states of them.
    """
    mentions, at = [], 0
    if prompt:
        words = _camera_words(camera, draw, adjectives)
        mentions.append(Mention(0, len(words)))
        at = len(words) + len(" of ")
        text = f"{words} of {text}"
    for name, things, pattern in meant:
        start = text.index(name, at)
        at = start + len(name)
        mentions.append(Mention(start, at, things, pattern))
    return Caption(text + "." if draw.random() < 0.25 else text, predicate, tuple(mentions))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _shuffled(things: Sequence[Thing], draw: random.Random) -> list[Thing]:
    return [thing for _, thing in sorted(((draw.random(), thing) for thing in things), key=lambda pair: pair[0])]
