"""Phrases and their boxes in Flickr30k Entities' form: Annotations/ID.xml, Sentences/ID.txt, flickr30k-images/ID.jpg.

An image has the five captions of the set, with their noun phrases marked: [/EN#ID/TYPE phrase]. One id is one object,
or one group of objects, in all captions of an image. The type is what the phrase states: exact (shape, colour, and size
or place), kind (shape and colour), shape, colour, object (none of them), or scene (the picture itself, without a box).
val.txt and test.txt list the images. Boxes count pixels from 1, both ends included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tools.scene_forms.chunk import Chunk, jpeg, truth

if TYPE_CHECKING:
    from probemb.data.scenes.predicates import Caption, Mention
    from probemb.data.scenes.world import Scene

CAPTIONS = 5
_FIRST = {"val": 1_000_000, "test": 2_000_000}  # ids of images
_IDS = 16  # of phrases, for each image


def parts(counts: dict[str, int]) -> dict[str, int]:
    """Images by part; the test split is as large as the validation split."""
    return {part: counts["val"] for part in _FIRST if counts.get("val")}


def prepare(chunk: Chunk) -> None:
    """Make the folders."""
    for name in ("Annotations", "Sentences", "flickr30k-images"):
        (chunk.folder / name).mkdir(exist_ok=True)


def write_chunk(chunk: Chunk) -> dict[str, list[str]]:
    """Write the images, their sentences and boxes; the lines of the split's list and of the truth."""
    from probemb.data import scenes

    listed, known = [], []
    for index in chunk.indices:
        number = _FIRST[chunk.part] + index
        scene = scenes.scene(chunk.scene_seed, index)
        captions = scenes.draw_captions(scene, CAPTIONS)
        ids = phrase_ids(scene, captions, number * _IDS)
        sentences = "".join(f"{marked(scene, caption, ids)}\n" for caption in captions)
        (chunk.folder / "Sentences" / f"{number}.txt").write_text(sentences, encoding="utf-8")
        boxes = annotation(scene, ids, f"{number}.jpg", chunk.size)
        (chunk.folder / "Annotations" / f"{number}.xml").write_bytes(boxes)
        (chunk.folder / "flickr30k-images" / f"{number}.jpg").write_bytes(jpeg(scene, chunk.size))
        listed.append(str(number))
        known.append(truth(scene, captions, chunk.size, image_id=number))
    return {f"{chunk.part}.txt": listed, "scenes.jsonl": known}


def phrase_ids(scene: Scene, captions: list[Caption], first: int) -> dict[tuple[int, ...], int]:
    """The id of each object or group of objects (indices) that the captions mention; () is the picture itself."""
    ids: dict[tuple[int, ...], int] = {}
    for caption in captions:
        for mention in caption.mentions:
            ids.setdefault(_meant(scene, mention), first + len(ids))
    return ids


def _meant(scene: Scene, mention: Mention) -> tuple[int, ...]:
    return tuple(sorted(scene.things.index(thing) for thing in mention.things))


def phrase_type(mention: Mention) -> str:
    """Content of a phrase; see the top of this file."""
    if not mention.things:
        return "scene"
    pattern = mention.pattern
    if pattern.shape and pattern.colour:
        return "exact" if pattern.size or pattern.place else "kind"
    return "shape" if pattern.shape else "colour" if pattern.colour else "object"


def marked(scene: Scene, caption: Caption, ids: dict[tuple[int, ...], int]) -> str:
    """The caption with its phrases marked, and its punctuation set apart, as the published sentences have it."""
    text, at = "", 0
    for mention in caption.mentions:
        phrase = caption.text[mention.start : mention.end]
        text += _apart(caption.text[at : mention.start])
        text += f"[/EN#{ids[_meant(scene, mention)]}/{phrase_type(mention)} {phrase}]"
        at = mention.end
    return text + _apart(caption.text[at:])


def _apart(text: str) -> str:
    return text.replace(",", " ,").replace(".", " .")


def annotation(scene: Scene, ids: dict[tuple[int, ...], int], name: str, size: int) -> bytes:
    """The XML of an image: the box of each object with the ids of all phrases that mean it."""
    from probemb.data.scenes import boxes

    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = name
    _fill(ElementTree.SubElement(root, "size"), {"width": size, "height": size, "depth": 3})
    for thing, (left, top, right, bottom) in enumerate(boxes(scene, size)):
        names = [number for meant, number in ids.items() if thing in meant]
        if names:
            one = _object(root, names)
            corners = {"xmin": math.floor(left) + 1, "ymin": math.floor(top) + 1}
            corners |= {"xmax": math.ceil(right), "ymax": math.ceil(bottom)}
            _fill(ElementTree.SubElement(one, "bndbox"), corners)
    if () in ids:
        _fill(_object(root, [ids[()]]), {"scene": 1, "nobndbox": 1})
    ElementTree.indent(root)
    return ElementTree.tostring(root) + b"\n"


def _object(root: ElementTree.Element, names: list[int]) -> ElementTree.Element:
    one = ElementTree.SubElement(root, "object")
    for number in names:
        ElementTree.SubElement(one, "name").text = str(number)
    return one


def _fill(element: ElementTree.Element, values: dict[str, int]) -> None:
    for key, value in values.items():
        ElementTree.SubElement(element, key).text = str(value)
