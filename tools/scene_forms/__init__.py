"""The synthetic world in the published formats of data with regions and boxes, the truth known: `make_scenes --boxes`.

    regions/        SCAN's and VSRN's region features          probemb/data/regions
    entities/       Flickr30k Entities: phrases and boxes      probemb/data/boxes/entities.py
    visual_genome/  Visual Genome's region descriptions        probemb/data/boxes/visual_genome.py
    cub/            CUB-200-2011 with ten captions an image    classes that are trained on and held out

`scenes.jsonl` (`SPLIT_scenes.jsonl` of regions) has the scene, its captions and their predicates of each image, as
`probemb.data.scenes.sample_from_json` reads them, and the tight box of every object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from tools.scene_forms import cub, entities, regions, visual_genome
from tools.scene_forms.chunk import Chunk

FORMS: dict[str, ModuleType] = {"regions": regions, "entities": entities, "visual_genome": visual_genome, "cub": cub}
CHUNK = 500  # images that one process writes at a time


def plan_chunks(folder: Path, counts: dict[str, int], seed: int, size: int) -> list[tuple[str, Chunk]]:
    """(form, chunk) of everything to write below a set's folder; `counts`: images of its parts train, val, classes."""
    found = []
    for name, form in FORMS.items():
        for part, count in form.parts(counts).items():
            for first in range(0, count, CHUNK):
                number = min(CHUNK, count - first)
                found.append((name, Chunk(folder / name, part, first, number, count, seed, size)))
    return found


def prepare(chunks: list[tuple[str, Chunk]]) -> None:
    """Make the folders and the files of a fixed size, which chunks fill."""
    for name, chunk in chunks:
        if chunk.first == 0:
            chunk.folder.mkdir(exist_ok=True)
            FORMS[name].prepare(chunk)


def write_chunk(task: tuple[str, Chunk]) -> tuple[tuple[str, Chunk], dict[str, list[str]]]:
    """Write the images of a chunk; returns its lines of the form's lists, by file name."""
    name, chunk = task
    return task, FORMS[name].write_chunk(chunk)


def write_forms(
    tasks: list[tuple[str, Chunk]], run: Callable[[Callable, list], Iterator], advance: Callable[[int], None]
) -> None:
    """Write all chunks, in any order, and then the lists, in the order of the chunks.

    Args:
        run: maps a function over tasks, in processes or not; advance: called with a number of written images.
    """
    prepare(tasks)
    lines: dict[tuple[str, Chunk], dict[str, list[str]]] = {}
    for task, found in run(write_chunk, tasks):
        lines[task] = found
        advance(task[1].count)
    texts: dict[Path, list[str]] = {}
    for task in tasks:
        for name, rows in lines[task].items():
            texts.setdefault(task[1].folder / name, []).extend(rows)
    for file, rows in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    for name, form in FORMS.items():
        if any(task[0] == name for task in tasks) and hasattr(form, "finish"):
            form.finish(next(task[1].folder for task in tasks if task[0] == name))
