"""The main claims of PCME++'s paper, re-tested where a small machine can: on drawn scenes and on photographs.

    make claims                                        # scenes; at most 30 minutes on two cores; run again to resume
    python -m tools.claims --out claims --seeds 3      # the same
    python -m tools.claims --out claims --report       # trains nothing: what the seeds that are finished say
    python -m tools.claims --world ambiguity --out claims-ambiguity  # what the variance means; see ambiguity/study.py
    python -m tools.claims --world flickr8k --data data/flickr8k --images-weights tf_efficientnet_lite0.safetensors \\
        --word-vectors glove.txt.gz --out claims-flickr8k  # photographs; see flickr8k/study.py
    python -m tools.claims --methods all --out claims-methods  # every method; also --world flickr8k; methods/study.py
    python -m tools.claims --methods composed --out claims-composed  # MPC and its rivals; also --world coco_small;
                                                                     # composed/study.py

A world has its own trainings and findings (`scenes/study.py`, `ambiguity/study.py`, `flickr8k/study.py`), and so has
the comparisons of methods (`methods/study.py`, `composed/study.py`). Every
training that is finished stays in OUT/trainings and is not repeated. OUT/claims.json holds all numbers, OUT/claims.md
the tables, OUT/report.html tables and plots. Verdicts follow from the numbers: a difference counts if its 95 % interval
(paired over the seeds, Student's t) leaves out 0; † marks what Holm's correction over the claim's comparisons rejects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import Parser
from probemb.errors import UserError

if TYPE_CHECKING:
    from tools.claims.study import Study

GENERATOR = "probemb tools.claims"
WORLDS = ("scenes", "flickr8k", "ambiguity", "coco_small")
PHOTOGRAPHS = ("data", "images_weights", "word_vectors", "judgements", "coco")  # options of flickr8k alone
COMPOSED_FILES = ("data", "lists", "images_weights", "word_vectors")  # of coco_small


def main(argv: Sequence[str] | None = None) -> int:
    from probemb.cli.ranges import Processes

    parser = Parser(prog="python -m tools.claims", description="Re-test the paper's main claims in miniature.")
    parser.add_argument("--world", choices=WORLDS, default="scenes", help="the data (default: scenes)")
    parser.add_argument(
        "--methods",
        help="compare methods: all, or names with commas, on scenes or flickr8k; composed, or names of MPC and its "
        "rivals, on scenes or coco_small",
    )
    epochs = "of the compared methods (default: 4 of photographs, 2 of composers on drawn scenes, 6 of others)"
    parser.add_argument("--epochs", type=int, help=epochs)
    parser.add_argument("--out", type=Path, default=Path("claims"), help="folder of the results (default: claims)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every training (default: 3)")
    parser.add_argument("--workers", type=Processes, default=2, help="trainings at a time, one core each (default: 2)")
    parser.add_argument("--choose", action="store_true", help="compare loss scalars and learning rates on validation")
    parser.add_argument("--report", action="store_true", help="train nothing, judge the seeds that are finished")
    photographs = parser.add_argument_group("flickr8k, coco_small")
    photographs.add_argument("--data", type=Path, help="captions with splits train, val and test, or categories")
    photographs.add_argument("--lists", type=Path, help="folder of MPC's published lists")
    photographs.add_argument("--images-weights", type=Path, help="file with the image tower's pretrained weights")
    photographs.add_argument("--word-vectors", type=Path, help="word vectors in GloVe's text format")
    photographs.add_argument("--judgements", type=Path, help="people's judgements of test pairs")
    photographs.add_argument("--coco", type=Path, help="captioned COCO images, a test set that nothing is trained on")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds} is too small.", "Give at least 1.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads do not outlive a fork
    study = make_study(options)
    if options.choose:
        study.choose(options.out, options.workers)
    else:
        run(study, options.out, options.seeds, options.workers, options.report)
    return 0


def make_study(options) -> Study:
    """The study of a world. Raises UserError: options of another world, or missing ones."""
    refuse_unused_files(options)
    if options.methods is not None:
        return compare_methods(options)
    if options.world == "coco_small":
        raise UserError("--world coco_small is for composed queries.", "Add --methods composed.")
    if options.epochs is not None:
        raise UserError("--epochs has no use without --methods.", "Leave it out, or add --methods all.")
    if options.world == "scenes":
        from tools.claims.scenes.study import Scenes

        return Scenes()
    if options.world == "ambiguity":
        from tools.claims.ambiguity.study import Ambiguity

        return Ambiguity()
    from tools.claims.flickr8k.study import Flickr8k
    from tools.claims.flickr8k.world import Files

    if options.data is None:
        raise UserError("--data is missing.", "Name the shards of Flickr8k, with the splits train, val and test.")
    return Flickr8k(Files(**{name: getattr(options, name) for name in PHOTOGRAPHS}))


def refuse_unused_files(options) -> None:
    """Raise UserError for files that the world does not read."""
    reads = {"flickr8k": PHOTOGRAPHS, "coco_small": COMPOSED_FILES}.get(options.world, ())
    given = (name for name in {*PHOTOGRAPHS, *COMPOSED_FILES} if getattr(options, name) is not None)
    for name in sorted(set(given) - set(reads)):
        named, world = f"--{name.replace('_', '-')}", "flickr8k" if name in PHOTOGRAPHS else "coco_small"
        where = f"--world {options.world}" if reads else "drawn scenes"
        raise UserError(f"{named} has no use with {where}.", f"Add --world {world}, or leave {named} out.")


def compare_methods(options) -> Study:
    """The comparison of methods in a world. Raises UserError: an unknown method, or a world without one."""
    from tools.claims.composed.variants import composed_variants
    from tools.claims.flickr8k.world import Files
    from tools.claims.methods.study import Methods, Settings
    from tools.claims.methods.variants import chosen_variants

    if options.world == "ambiguity":
        raise UserError("--methods has no use with --world ambiguity.", "Name scenes, flickr8k or coco_small.")
    if options.coco is not None:
        raise UserError("--coco has no use with --methods.", "Leave it out.")
    if options.epochs is not None and options.epochs < 1:
        raise UserError(f"--epochs {options.epochs} is too small.", "Give at least 1.")
    composed = composed_variants(options.methods)
    if composed:
        return compare_composed(options, composed)
    if options.world == "coco_small":
        raise UserError(f"--world coco_small compares no {options.methods}.", "Add --methods composed.")
    files = Files(**{name: getattr(options, name) for name in PHOTOGRAPHS})
    return Methods(files, chosen_variants(options.methods), Settings(options.world, options.epochs or 0))


def compare_composed(options, variants: Sequence[str]) -> Study:
    """The comparison of composers. Raises UserError: a world without one."""
    from tools.claims.composed.study import Composed
    from tools.claims.composed.training import settings_of
    from tools.claims.composed.world import Files

    if options.world == "flickr8k":
        raise UserError("--world flickr8k has no composed queries.", "Name scenes or coco_small.")
    files = Files(**{name: getattr(options, name) for name in COMPOSED_FILES})
    return Composed(settings_of(options.world, options.epochs or 0), files, variants)


def run(study: Study, out: Path, n_seeds: int = 3, workers: int = 2, report_only: bool = False) -> dict:
    """Train what is not there yet, then judge and write; returns what claims.json holds."""
    from probemb.cli.results import claim_files, write_json
    from probemb.files import replace_text
    from tools.claims.queue import Archive, measure_all, train_all
    from tools.claims.report import report
    from tools.claims.tables import markdown_tables, text_tables
    from tools.claims.verdicts import Found, mark_family

    claim_files(out, ("claims.json", "claims.md", "report.html"), GENERATOR)
    archive = Archive(out, study)
    seeds, began = list(range(n_seeds)), time.perf_counter()
    if report_only:
        seeds = [seed for seed in seeds if all(archive.read(one) for one in study.plan([seed]))]
        if not seeds:
            raise UserError(f"No seed is finished in {out}.", "Start without --report to train.")
    trainings = study.plan(seeds)
    found = (measure_all if report_only else train_all)(study, trainings, archive, workers)
    seconds = time.perf_counter() - began
    by_variant = Found(trainings, found, archive.name)
    claims = study.judge(by_variant, archive)
    for claim in claims:
        mark_family(claim["comparisons"])
    print("\n".join(text_tables(claims)), flush=True)
    content = {
        "settings": asdict(study.settings),
        "seeds": seeds,
        "seconds": seconds,
        "claims": claims,
        "trainings": [{**asdict(training), **found[archive.name(training)]} for training in trainings],
    }
    write_json(out / "claims.json", content, GENERATOR)
    told = study.describe(len(trainings), seeds)
    replace_text(out / "claims.md", "\n".join([f"<!-- {GENERATOR} -->", told, "", *markdown_tables(claims)]) + "\n")
    report(out / "report.html", study, claims, by_variant, told, GENERATOR)
    print(f"\n{len(trainings)} trainings, {seconds / 60:.1f} min | {out / 'claims.json'} | {out / 'report.html'}")
    return content
