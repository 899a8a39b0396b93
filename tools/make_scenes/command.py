"""Write the synthetic world as webdataset shards.

    python -m tools.make_scenes data/scenes --train 20000 --val 1000 --classes-images 1000

    OUT/train/*.tar, OUT/val/*.tar   KEY.jpg, KEY.txt (captions, exact to vague), KEY.json (the scene)
    OUT/val/truth.npz                which caption is true of which image, and how vague each is; not of training splits
    OUT/classes/*.tar, classes.txt   KEY.jpg, KEY.cls: one object per image, for zero-shot classification: 192 classes
    OUT/classes/prompts.json         80 captions of other pictures of each class, exact to vague, as its prompts
    OUT/by-class/{train,val,test}    the same of one object each, with their class in KEY.json (--class-captions): 48
                                     classes in train and val, 16 others in test, as in CUB with captions
    OUT/compositions                 pictures of up to five objects, and combinations of these (--compositions)
    OUT/vocabulary.txt               words of the training captions and their counts, for models that read words
    OUT/scenes.json                  the arguments; written last, so that a set with it is complete

--boxes adds the same world in published formats: regions/, entities/, visual_genome/ (`forms.py`).

Each shard folder has its index.json. The same arguments give the same bytes. The set is written beside OUT and renamed
when it is complete; a complete set of the same arguments is kept.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from probemb.cli.command import Parser
from probemb.cli.configuration import docstring_texts
from probemb.cli.ranges import Processes
from probemb.data.captions.dataset import TRUTH
from probemb.data.shards.index import Shard, write_index
from probemb.data.shards.write import encode_captions, tar_writer
from probemb.data.words import VOCABULARY, count_words, frequent_words, write_vocabulary
from probemb.errors import UserError
from probemb.files import file_sha256, writing
from probemb.progress import progress
from probemb.runs.lock import new_folder
from tools.make_scenes import world
from tools.make_scenes.captions import draw_captions, write_truth
from tools.make_scenes.compositions import composed_sample, write_combinations
from tools.make_scenes.drawing import jpeg
from tools.make_scenes.forms import plan_forms, write_form
from tools.make_scenes.world import KINDS, SEEN, SIZED_KINDS, UNSEEN, Scene
from tools.pools import process_pool

RECORD = "scenes.json"
BY_CLASS, COMPOSED = "by-class/", "compositions/"
MAX_PAIRS = 2_000_000_000  # of images and captions of a split whose truth is known
Side = restricted_number_type("Side", int, [(">=", 16), ("<=", 1024)])


@dataclass(frozen=True)
class Plan:
    """Arguments of a set.

    Args:
        train: training images
        val: validation images
        classes_images: images for zero-shot classification
        size: side of an image in pixels
        seed: number of the world
        shard_size: samples per shard
        captions: captions per image
        class_captions: images of one object with captions and a class; an eighth more for val, a quarter for test
        compositions: images of up to five objects for composed retrieval, split 4:1:1; 15000 give all lists
        boxes: also write forms with regions and boxes
    """

    train: NonNegativeInt = 20_000
    val: NonNegativeInt = 1_000
    classes_images: NonNegativeInt = 1_000
    size: Side = 64
    seed: int = 0
    shard_size: PositiveInt = 1_000
    captions: PositiveInt = 5
    class_captions: NonNegativeInt = 0
    compositions: NonNegativeInt = 0
    boxes: bool = False

    def parts(self) -> dict[str, int]:
        """Number of samples by folder, without empty parts."""
        parts = {"train": self.train, "val": self.val, "classes": self.classes_images}
        shares = {"train": 1.0, "val": 0.125, "test": 0.25}
        parts |= {f"{BY_CLASS}{split}": round(share * self.class_captions) for split, share in shares.items()}
        sixths = {"train": 4, "val": 1, "test": 1}
        parts |= {f"{COMPOSED}{split}": self.compositions * share // 6 for split, share in sixths.items()}
        return {name: count for name, count in parts.items() if count}

    def scene(self, part: str, index: int) -> Scene:
        """Scene `index` of a part with captions, or of the classes."""
        seed = f"{self.seed} {part}"  # parts never share a scene's random state
        if part == "classes":
            return world.class_scene(seed, index)
        if part.startswith(BY_CLASS):
            return world.class_scene(seed, index, UNSEEN if part.endswith("test") else SEEN)
        return world.scene(seed, index)

    def has_truth(self, part: str) -> bool:
        """True of every part with captions that no model is trained on."""
        return part in ("val", f"{BY_CLASS}val", f"{BY_CLASS}test")


def sample_files(plan: Plan, part: str, index: int) -> dict[str, bytes]:
    """Members of sample `index` of a part, by extension; a pure function of the arguments."""
    if part.startswith(COMPOSED):
        return composed_sample(plan.seed, part.removeprefix(COMPOSED), index, plan.size)
    scene = plan.scene(part, index)
    if part == "classes":
        return {"jpg": jpeg(scene, plan.size), "cls": str(scene.things[0].sized_kind).encode()}
    row = {"scene": asdict(scene)} | ({"class": KINDS[scene.things[0].kind]} if part.startswith(BY_CLASS) else {})
    text = encode_captions(caption.text for caption in draw_captions(scene, plan.captions))
    return {"jpg": jpeg(scene, plan.size), "txt": text, "json": json.dumps(row, separators=(",", ":")).encode()}


def part_truth(plan: Plan, part: str, folder: Path) -> None:
    """Write the truth of a part."""
    scenes = [plan.scene(part, index) for index in range(plan.parts()[part])]
    ids = [f"{index:08d}" for index in range(len(scenes))]
    write_truth(folder / part / TRUTH, ids, scenes, [draw_captions(scene, plan.captions) for scene in scenes])


def caption_prompts(seed: int, count: int = 80) -> dict[str, list[str]]:
    """Prompts of each zero-shot class: captions, exact to vague, of other pictures of the class."""
    texts, drawn = [[] for _ in SIZED_KINDS], itertools.count()
    while min(map(len, texts)) < count:
        scene = world.class_scene(f"{seed} prompts", next(drawn))
        texts[scene.things[0].sized_kind] += [caption.text for caption in draw_captions(scene)]
    return {name: row[:count] for name, row in zip(SIZED_KINDS, texts)}


def write_shard(plan: Plan, part: str, path: Path, first: int, count: int) -> tuple[Shard, Counter[str]]:
    """Write samples first ... first + count - 1 of a part as a tar; returns also the word counts of its captions."""
    words: Counter[str] = Counter()
    with open(path, "wb") as file, tar_writer(file) as tar:
        for index in range(first, first + count):
            members = sample_files(plan, part, index)
            tar.write({"__key__": f"{index:08d}", **members})
            words.update(count_words(members.get("txt", b"").decode().split("\n")))
    return Shard(path.name, path, count, path.stat().st_size, file_sha256(path)), words


def write_set(plan: Plan, folder: Path, workers: int) -> None:
    """Write the whole set into an existing, empty folder, with progress."""
    tasks = []
    for part, count in plan.parts().items():
        (folder / part).mkdir(parents=True)
        for number, first in enumerate(range(0, count, plan.shard_size)):
            size = min(plan.shard_size, count - first)
            tasks.append((plan, part, folder / part / f"{number:05d}.tar", first, size))
    forms = plan_forms(folder, plan.parts(), plan.seed, plan.size) if plan.boxes else []
    shards, words = [], Counter()  # of the training captions
    total = sum(plan.parts().values()) + sum(form.count for form in forms)
    with progress("Drawing scenes", total) as advance:
        for shard, found in _run_all(write_shard, tasks, workers):
            shards.append(shard)
            if shard.path.parent.name == "train":  # also by class
                words += found
            advance(shard.samples)
        for count in _run_all(write_form, [(form,) for form in forms], workers):
            advance(count)
    for part in plan.parts():
        of_part = (shard for shard in shards if shard.path.parent == folder / part)
        write_index(folder / part, sorted(of_part, key=lambda shard: shard.name))
        if plan.has_truth(part):
            part_truth(plan, part, folder)
    if plan.compositions:
        write_combinations(folder / COMPOSED, plan.seed)
    if words:
        write_vocabulary(folder / VOCABULARY, frequent_words(words))
    if plan.classes_images:
        names = "".join(f"{name}\n" for name in SIZED_KINDS)
        (folder / "classes" / "classes.txt").write_text(names, encoding="utf-8")
        (folder / "classes" / "prompts.json").write_text(_json(caption_prompts(plan.seed)), encoding="utf-8")
    (folder / RECORD).write_text(_json(describe(plan)), encoding="utf-8")


def _run_all(write: Callable, tasks: list, workers: int) -> Iterator:
    """Results of `write` for each task, in the order in which they are done."""
    with process_pool(workers, len(tasks), "--workers") as pool:
        for done in as_completed([pool.submit(write, *task) for task in tasks]):
            yield done.result()


def describe(plan: Plan) -> dict:
    """The arguments and a fingerprint of some samples, which detects sets of another version."""
    digest = hashlib.sha256()
    for part in plan.parts():
        for index in range(8):
            for extension, data in sample_files(plan, part, index).items():
                digest.update(extension.encode() + data)
    return {"arguments": asdict(plan), "fingerprint": digest.hexdigest()}


def make(plan: Plan, out: Path, workers: int) -> bool:
    """Make the set in `out`; False if it exists already. Raises UserError if `out` holds something else."""
    made = out / RECORD
    if made.is_file() and made.read_text(encoding="utf-8") == _json(describe(plan)):
        return False
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "a set of scenes made with other arguments or by another version" if made.is_file() else "something else"
        raise UserError(f"{out} already holds {what}.", "Name a new folder, or remove that one first.")
    with writing(out, "Free some space, or name another folder."), new_folder(out) as folder:
        write_set(plan, folder, workers)
    return True


def _json(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.make_scenes", description="Write the synthetic world as webdataset shards.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    kinds, texts = get_type_hints(Plan), docstring_texts(Plan)
    for name, default in asdict(Plan()).items():
        kind = {"action": "store_true"} if kinds[name] is bool else {"type": kinds[name], "default": default}
        text = texts[name] + " (default: %(default)s)" * (kinds[name] is not bool)
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **kind)
    parser.add_argument("--workers", type=Processes, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args(argv)
    plan = Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})
    if not plan.parts():
        raise UserError("No images were requested.", "Give --train, --val or --classes-images a number above 0.")
    for part, count in plan.parts().items():
        if plan.has_truth(part) and count * count * plan.captions > MAX_PAIRS:
            raise UserError(
                f"The truth of {count:,} images of {part} with {plan.captions} captions each does not fit into memory.",
                f"Ask for at most {MAX_PAIRS:,} pairs.",
            )
    fresh = make(plan, options.out, options.workers)
    counts = ", ".join(f"{count:,} {part}" for part, count in plan.parts().items())
    print(f"{'wrote' if fresh else 'kept, already complete,'} {options.out}: {counts} images")
    return 0
