"""Classes with captions in the form of CUB-200-2011 and its ten captions an image (text_c10).

    images.txt, classes.txt, image_class_labels.txt, bounding_boxes.txt, train_test_split.txt    "ID value" lines
    images/CLASS/NAME.jpg, text_c10/CLASS/NAME.txt
    trainvalclasses.txt, testclasses.txt    48 classes to train on and 16 others, by name
    seen_test_images.txt                    every eighth image of the 48 classes, held out of training

The classes are shape x colour. No class of the test split is trained on, but every shape and every colour is. The
images are those of the set's `classes`.
"""

from __future__ import annotations

from tools.scene_forms.chunk import Chunk, jpeg, truth

CAPTIONS = 10
_HELD_OUT = 8  # every eighth image of a class


def parts(counts: dict[str, int]) -> dict[str, int]:
    """Images by part: those of the set's `classes`."""
    return {"classes": counts["classes"]} if counts.get("classes") else {}


def class_folders() -> list[str]:
    """The 64 classes as folder names: 001.red_circle."""
    from probemb.data.scenes import class_names

    return [f"{i + 1:03d}.{name.replace(' ', '_')}" for i, name in enumerate(class_names())]


def prepare(chunk: Chunk) -> None:
    """Make the folders and the lists of classes."""
    from probemb.data.scenes import unseen_classes

    folders, unseen = class_folders(), set(unseen_classes())
    for name in folders:
        (chunk.folder / "images" / name).mkdir(parents=True, exist_ok=True)
        (chunk.folder / "text_c10" / name).mkdir(parents=True, exist_ok=True)
    lists = {
        "classes.txt": [f"{i + 1} {name}" for i, name in enumerate(folders)],
        "trainvalclasses.txt": [name for i, name in enumerate(folders) if i not in unseen],
        "testclasses.txt": [name for i, name in enumerate(folders) if i in unseen],
    }
    for name, lines in lists.items():
        (chunk.folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_chunk(chunk: Chunk) -> dict[str, list[str]]:
    """Write the images and their captions; the lines of the lists and of the truth."""
    from probemb.data import scenes

    numbered = ("images.txt", "image_class_labels.txt", "bounding_boxes.txt", "train_test_split.txt")
    lines: dict[str, list[str]] = {name: [] for name in (*numbered, "seen_test_images.txt", "scenes.jsonl")}
    folders, unseen = class_folders(), set(scenes.unseen_classes())
    for index in chunk.indices:
        scene = scenes.class_scene(chunk.scene_seed, index)
        label, number = scenes.class_label(scene), index + 1
        name = f"{folders[label]}/{index:08d}"
        captions = scenes.draw_captions(scene, CAPTIONS)
        (chunk.folder / "images" / f"{name}.jpg").write_bytes(jpeg(scene, chunk.size))
        text = "".join(f"{caption.text}\n" for caption in captions)
        (chunk.folder / "text_c10" / f"{name}.txt").write_text(text, encoding="utf-8")
        left, top, right, bottom = scenes.boxes(scene, chunk.size)[0]
        box = f"{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}"
        held_out = label not in unseen and index // len(folders) % _HELD_OUT == _HELD_OUT - 1
        trained = int(label not in unseen and not held_out)
        for file, value in zip(numbered, (f"{name}.jpg", label + 1, box, trained)):
            lines[file].append(f"{number} {value}")
        lines["seen_test_images.txt"] += [f"{name}.jpg"] * held_out
        lines["scenes.jsonl"].append(truth(scene, captions, chunk.size))
    return lines
