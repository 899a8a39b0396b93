"""The synthetic world beside plain shards: composed pictures, and published formats with regions and boxes.

    regions/        SCAN's and VSRN's region features: SPLIT_ims.npy (N, R, F) float32, SPLIT_caps.txt, SPLIT_ids.txt
    entities/       Flickr30k Entities: Annotations/ID.xml, Sentences/ID.txt, flickr30k-images/ID.jpg, val.txt, test.txt
    visual_genome/  Visual Genome: region_descriptions.json, image_data.json, VG_100K/ID.jpg
    cub/            CUB-200-2011 with its ten captions an image: images/CLASS/NAME.jpg, text_c10/CLASS/NAME.txt, lists
    compositions/   shards of pictures of up to five objects, and combinations of these in MPC's published form

`scenes.jsonl` (`SPLIT_scenes.jsonl` of regions) has the scene, its captions and their predicates of each image, as
`probemb.data.scenes.sample_from_json` reads them, and the tight box of every object.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import count as count_from
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from probemb.data import scenes
from probemb.data.compositions import sample_tuples
from probemb.data.compositions.shards import CATEGORIES, read_concept_shards
from probemb.data.compositions.tuples import COMBINATIONS
from probemb.data.scenes import composed
from probemb.data.scenes.predicates import Caption, Mention
from probemb.data.scenes.world import Scene
from probemb.data.shards.samples import encode_captions

CAPTIONS = 5  # of an image in regions/ and entities/, as the published files have
Box = tuple[float, float, float, float]


class Form(NamedTuple):
    """One piece of work: `count` images of a part, written into a folder below the set's, in order, by one process."""

    write: Callable[[Form], None]
    folder: Path
    part: str
    count: int
    seed: str  # of the part's scenes: `val` of a form shows the images of the set's `val`
    size: int  # side of an image in pixels

    def append(self, name: str, rows: Sequence[str]) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.writelines(f"{row}\n" for row in rows)


def plan_forms(folder: Path, counts: dict[str, int], seed: int, size: int) -> list[Form]:
    """All forms with boxes of a set, whose parts train, val and classes have so many images; makes their folders."""
    val, classes = counts.get("val", 0), counts.get("classes", 0)
    planned = [(write_regions, "regions", "train", counts.get("train", 0)), (write_regions, "regions", "val", val)]
    planned += [(write_regions, "regions", "test", val), (write_entities, "entities", "val", val)]
    planned += [(write_visual_genome, "visual_genome", "crops", val), (write_cub, "cub", "classes", classes)]
    forms = [
        Form(write, folder / name, part, count, f"{seed} {part}", size) for write, name, part, count in planned if count
    ]
    for form in forms:
        form.folder.mkdir(exist_ok=True)
    return forms


def write_form(form: Form) -> Form:
    form.write(form)
    return form


def jpeg(scene: Scene, size: int) -> bytes:
    """The encoded picture of a scene, the same in all forms."""
    encoded = io.BytesIO()
    scenes.render(scene, size).save(encoded, "JPEG", quality=90, subsampling=0)
    return encoded.getvalue()


def truth(scene: Scene, captions: Sequence[Caption], size: int, **more: object) -> str:
    """One line of scenes.jsonl."""
    boxes = [[round(at, 3) for at in box] for box in scenes.boxes(scene, size)]
    return json.dumps({**scenes.sample_to_json(scene, captions), "boxes": boxes, **more}, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------------- regions
# An image has R = 6 regions in a random order: its objects, the whole image, and background. A region's F = 437
# features are its crop of 12 x 12 pixels, row by row in RGB from -1 to 1, and its box: left, top, right, bottom and
# area as shares of the image. SPLIT_scenes.jsonl also says what each region shows and where (in pixels).

REGIONS, CROP = 6, 12
FEATURES = 3 * CROP * CROP + 5
WHOLE, BACKGROUND = -1, -2  # in place of an object's index


def write_regions(form: Form) -> None:
    name = {"val": "dev"}.get(form.part, form.part)
    file = form.folder / f"{name}_ims.npy"
    features = np.lib.format.open_memmap(file, "w+", np.float32, (form.count, REGIONS, FEATURES))
    texts, known = [], []
    for index in range(form.count):
        scene = scenes.scene(form.seed, index)
        captions = scenes.draw_captions(scene, CAPTIONS)
        regions, objects = choose_regions(scene, form.size)
        features[index] = region_features(scenes.render(scene, form.size), regions)
        texts += [caption.text for caption in captions]
        placed = [[round(at, 3) for at in box] for box in regions]
        known.append(truth(scene, captions, form.size, regions=placed, objects=objects))
    features.flush()
    form.append(f"{name}_caps.txt", texts)
    form.append(f"{name}_ids.txt", [str(index) for index in range(form.count)])
    form.append(f"{name}_scenes.jsonl", known)


def choose_regions(scene: Scene, size: int) -> tuple[list[Box], list[int]]:
    """REGIONS boxes (left, top, right, bottom) in pixels, and what each shows; a pure function of the scene."""
    draw, things = random.Random(f"regions {scene.seed}"), scenes.boxes(scene, size)

    def somewhere() -> Box:
        """A box up to the size of a small object."""
        width, height = (size * (0.1 + 0.2 * draw.random()) for _ in range(2))
        left, top = (size - width) * draw.random(), (size - height) * draw.random()
        return left, top, left + width, top + height

    def covered(a: Box) -> float:
        """Pixels that a box shares with the objects."""
        return sum(
            max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1])) for b in things
        )

    found: list[tuple[Box, int]] = [(box, i) for i, box in enumerate(things)]
    found.append(((0.0, 0.0, float(size), float(size)), WHOLE))
    while len(found) < REGIONS:
        found.append((min([somewhere() for _ in range(24)], key=covered), BACKGROUND))  # the emptiest of 24
    order = sorted((draw.random(), row) for row in range(REGIONS))
    return [found[row][0] for _, row in order], [found[row][1] for _, row in order]


def region_features(image: Image.Image, regions: list[Box]) -> np.ndarray:
    """(R, FEATURES) float32 of the regions of one image."""
    width, height = image.size
    rows = np.empty((len(regions), FEATURES), dtype=np.float32)
    for row, box in zip(rows, regions):
        crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        left, top, right, bottom = box[0] / width, box[1] / height, box[2] / width, box[3] / height
        row[:-5] = np.asarray(crop, dtype=np.float32).reshape(-1) / 127.5 - 1
        row[-5:] = left, top, right, bottom, (right - left) * (bottom - top)
    return rows


# ------------------------------------------------------------------------------------------------------------ entities
# The captions with their noun phrases marked: [/EN#ID/TYPE phrase]. One id is one object, or one group of objects, in
# all captions of an image. Boxes count pixels from 1, both ends included. The test split is as large as the val split.


def write_entities(form: Form) -> None:
    for name in ("Annotations", "Sentences", "flickr30k-images"):
        (form.folder / name).mkdir()
    world = form.seed.removesuffix(form.part)
    for split, first in (("val", 1_000_000), ("test", 2_000_000)):
        known = []
        for index in range(form.count):
            number, scene = first + index, scenes.scene(world + split, index)
            captions = scenes.draw_captions(scene, CAPTIONS)
            ids = phrase_ids(scene, captions, 16 * number)
            sentences = "".join(f"{marked(scene, caption, ids)}\n" for caption in captions)
            (form.folder / "Sentences" / f"{number}.txt").write_text(sentences, encoding="utf-8")
            boxes = annotation(scene, ids, f"{number}.jpg", form.size)
            (form.folder / "Annotations" / f"{number}.xml").write_bytes(boxes)
            (form.folder / "flickr30k-images" / f"{number}.jpg").write_bytes(jpeg(scene, form.size))
            known.append(truth(scene, captions, form.size, image_id=number))
        form.append("scenes.jsonl", known)
        form.append(f"{split}.txt", [str(first + index) for index in range(form.count)])


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
    """Type of a phrase: exact (shape, colour, and size or place), kind (shape and colour), shape, colour, object (none
    of them), or scene (the picture itself, without a box)."""
    if not mention.things:
        return "scene"
    pattern = mention.pattern
    if pattern.shape and pattern.colour:
        return "exact" if pattern.size or pattern.place else "kind"
    return "shape" if pattern.shape else "colour" if pattern.colour else "object"


def marked(scene: Scene, caption: Caption, ids: dict[tuple[int, ...], int]) -> str:
    """The caption with its phrases marked, and its punctuation set apart, as the published sentences have it."""

    def apart(text: str) -> str:
        return text.replace(",", " ,").replace(".", " .")

    text, at = "", 0
    for mention in caption.mentions:
        phrase = caption.text[mention.start : mention.end]
        text += apart(caption.text[at : mention.start])
        text += f"[/EN#{ids[_meant(scene, mention)]}/{phrase_type(mention)} {phrase}]"
        at = mention.end
    return text + apart(caption.text[at:])


def annotation(scene: Scene, ids: dict[tuple[int, ...], int], name: str, size: int) -> bytes:
    """The XML of an image: the box of each object with the ids of all phrases that mean it."""
    root = ElementTree.Element("annotation")

    def add(parent: ElementTree.Element, kind: str, *values: tuple[str, int]) -> ElementTree.Element:
        element = ElementTree.SubElement(parent, kind)
        for key, value in values:
            ElementTree.SubElement(element, key).text = str(value)
        return element

    ElementTree.SubElement(root, "filename").text = name
    add(root, "size", ("width", size), ("height", size), ("depth", 3))
    for thing, (left, top, right, bottom) in enumerate(scenes.boxes(scene, size)):
        names = [("name", number) for meant, number in ids.items() if thing in meant]
        if names:
            corners = [("xmin", math.floor(left) + 1), ("ymin", math.floor(top) + 1)]
            corners += [("xmax", math.ceil(right)), ("ymax", math.ceil(bottom))]
            add(add(root, "object", *names), "bndbox", *corners)
    if () in ids:
        add(root, "object", ("name", ids[()]), ("scene", 1), ("nobndbox", 1))
    ElementTree.indent(root)
    return ElementTree.tostring(root) + b"\n"


# ------------------------------------------------------------------------------------------------------- visual_genome
# Every image has two or three objects, each a region described by shape, colour and size. Crop triplets A, B and their
# union follow from any two regions, with "a and b" as the union's caption (`probemb.data.boxes.crop_triplets`).


def write_visual_genome(form: Form) -> None:
    (form.folder / "VG_100K").mkdir()
    regions, images, known = [], [], []
    for index in range(form.count):
        several = (scenes.scene(f"{form.seed} {index}", i) for i in count_from())
        number, scene = index + 1, next(one for one in several if len(one.things) > 1)
        (form.folder / "VG_100K" / f"{number}.jpg").write_bytes(jpeg(scene, form.size))
        regions.append(json.dumps({"id": number, "regions": described(scene, number, form.size)}))
        images.append(json.dumps({"image_id": number, "width": form.size, "height": form.size}))
        known.append(truth(scene, scenes.draw_captions(scene), form.size, image_id=number))
    for name, rows in (("region_descriptions.json", regions), ("image_data.json", images)):
        (form.folder / name).write_text("[" + ",\n".join(rows) + "]\n", encoding="utf-8")
    form.append("scenes.jsonl", known)


def described(scene: Scene, number: int, size: int) -> list[dict]:
    """The regions of an image, with whole pixels counted from 0."""
    found = []
    for i, (thing, (left, top, right, bottom)) in enumerate(zip(scene.things, scenes.boxes(scene, size))):
        x, y = math.floor(left), math.floor(top)
        phrase = f"a {thing.size} {thing.colour} {thing.shape}"
        place = {"x": x, "y": y, "width": math.ceil(right) - x, "height": math.ceil(bottom) - y}
        found.append({"region_id": 4 * number + i, "image_id": number, "phrase": phrase, **place})
    return found


# ----------------------------------------------------------------------------------------------------------------- cub
# The classes are shape x colour. No class of the test split is trained on, but every shape and every colour is. Every
# eighth image of the 48 training classes is held out of training. The images are those of the set's `classes`.


def write_cub(form: Form) -> None:
    folders = [f"{i + 1:03d}.{name.replace(' ', '_')}" for i, name in enumerate(scenes.class_names())]
    unseen = set(scenes.unseen_classes())
    for name in folders:
        (form.folder / "images" / name).mkdir(parents=True)
        (form.folder / "text_c10" / name).mkdir(parents=True)
    form.append("classes.txt", [f"{i + 1} {name}" for i, name in enumerate(folders)])
    form.append("trainvalclasses.txt", [name for i, name in enumerate(folders) if i not in unseen])
    form.append("testclasses.txt", [name for i, name in enumerate(folders) if i in unseen])
    numbered = ("images.txt", "image_class_labels.txt", "bounding_boxes.txt", "train_test_split.txt")
    lines: dict[str, list[str]] = {name: [] for name in (*numbered, "seen_test_images.txt", "scenes.jsonl")}
    for index in range(form.count):
        scene = scenes.class_scene(form.seed, index)
        label, number = scenes.class_label(scene), index + 1
        name = f"{folders[label]}/{index:08d}"
        captions = scenes.draw_captions(scene, 10)
        (form.folder / "images" / f"{name}.jpg").write_bytes(jpeg(scene, form.size))
        text = "".join(f"{caption.text}\n" for caption in captions)
        (form.folder / "text_c10" / f"{name}.txt").write_text(text, encoding="utf-8")
        left, top, right, bottom = scenes.boxes(scene, form.size)[0]
        box = f"{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}"
        held_out = label not in unseen and index // len(folders) % 8 == 7
        trained = int(label not in unseen and not held_out)
        for file, value in zip(numbered, (f"{name}.jpg", label + 1, box, trained)):
            lines[file].append(f"{number} {value}")
        lines["seen_test_images.txt"] += [f"{name}.jpg"] * held_out
        lines["scenes.jsonl"].append(truth(scene, captions, form.size))
    for name, rows in lines.items():
        form.append(name, rows)


# -------------------------------------------------------------------------------------------------------- compositions
# train, val and test (4:1:1) as shards: KEY.jpg, KEY.txt (its concepts), KEY.json (categories, boxes, scene). Lists of
# combinations: 2_, 3_ and 4_cat_combinations.json are asked for in all splits; ..._zero_shot are further pairs, never
# among those; ..._impossible are pairs that no picture of this world has; 2_unseen_train and 2_unseen_test are another
# setup: pairs to train on, and other pairs of the same concepts.


def composed_counts(images: int) -> dict[str, int]:
    """Images of each split."""
    return {"train": images * 4 // 6, "val": images // 6, "test": images // 6}


def composed_sample(world: int, split: str, index: int, size: int) -> dict[str, bytes]:
    """Members of one sample, by extension; a pure function of the arguments."""
    scene = composed.composed_scene(world, split, index)
    names, held = composed.composed_concepts(), composed.scene_concepts(scene)
    boxes = []
    for concept, (left, top, right, bottom) in composed.concept_boxes(scene, size):
        boxes.append([concept + 1, [round(at, 3) for at in (left, top, right - left, bottom - top)]])
    row = {"categories": [concept + 1 for concept in held], "boxes": boxes}
    row |= {"width": size, "height": size, "scene": scene.to_json()}
    text = encode_captions(names[concept] for concept in held)
    return {"jpg": jpeg(scene, size), "txt": text, "json": json.dumps(row, separators=(",", ":")).encode()}


def write_combinations(folder: Path, seed: int) -> None:
    """Write the categories, and as many combinations as the paper has, each of at least 8, 2 and 2 images by split."""

    def write(name: str, rows: list) -> None:
        lines = ",\n".join(json.dumps(row) for row in rows)
        (folder / name).write_text(f"[{lines}]\n", encoding="utf-8")

    kinds = dict.fromkeys(composed.SETTINGS.values(), "setting")
    rows = [
        {"supercategory": kinds.get(name, "object"), "id": number, "name": name}
        for number, name in enumerate(composed.composed_concepts(), 1)
    ]
    write(CATEGORIES, rows)
    found = read_concept_shards(folder, seed)
    for k in (2, 3, 4):
        drawn = sample_tuples(found, k, seed, impossible=composed.impossible_pairs(seed))
        for name in COMBINATIONS if k == 2 else ["seen"]:
            rows = drawn[name].tolist()
            write(COMBINATIONS[name].file.format(k), [[concept + 1 for concept in row] for row in rows])
