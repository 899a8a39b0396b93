"""The main claims of PCME++'s paper, re-tested in miniature on the embedded world, where the truth is known.

    make claims                                        # at most 30 minutes on two cores; run again to go on with it
    python -m tools.claims --out claims --seeds 3      # the same
    python -m tools.claims --out claims --report       # trains nothing: what the seeds that are finished say

Every training that is finished stays in OUT/trainings and is not repeated. OUT/claims.json holds all numbers,
OUT/claims.md the tables, OUT/report.html tables and plots. Verdicts follow from the numbers: a difference of two means
over the seeds counts if it is larger than the spread, the standard deviation over the seeds of the difference within
a seed.

All methods of a seed start from one pretraining (InfoNCE on other scenes with exact captions), as the paper's start
from one CLIP, and see the same scenes in the same order. Towers, data and schedule are far smaller than the paper's;
losses, mixing, optimizer and trainer are those of `finetune`, without SizeAugment and GPO. Test scenes are used once,
after a training; the epoch is chosen by mAP@R on validation scenes.

How the values in CHOSEN were found: `python -m tools.claims --choose` trains InfoNCE, VSE, PCME and PCME++ with a seed
of its own and prints mAP@R on the validation scenes: for each method three values of its loss's own scalar, one more
beyond the end if the best is at an end, and another learning rate at the best of them; four or five trainings a
method. Weights of the regularisers (PP, VIB, share of mixed images) are the paper's, and the trainings without them or
with 2-Wasserstein take PCME++'s values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from probemb.cli.command import Parser
from probemb.errors import UserError

GENERATOR = "probemb tools.claims"
METHODS = ("infonce", "vse", "pcme", "pcmepp")
NOISE = (0.2, 0.5)
NOISE_ALPHA = {0.0: 0.1, 0.2: 0.01, 0.5: 0.0}  # the paper's pseudo-positive weights
SELECTION_SEED = 1000


def plan(seeds: Sequence[int]) -> list:
    """All trainings, seed after seed."""
    from tools.claims.findings import PAPERS_START, PRETRAINING, WITH_CLIP
    from tools.claims.training import Training

    trainings = []
    for seed in seeds:
        for noise in (0.0, *NOISE):
            for method in METHODS:
                name = method if not noise else f"{method} noise {noise:.0%}"
                trainings.append(Training(name, seed, method, noise, pseudo_positive=NOISE_ALPHA[noise]))
        plain = Training("csd", seed, "pcmepp", pseudo_positive=0.0, mix=0.0)
        trainings += [
            plain,
            replace(plain, name="wasserstein2", distance="wasserstein2"),
            Training("without PP", seed, "pcmepp", pseudo_positive=0.0),
            Training("without MSDA", seed, "pcmepp", mix=0.0),
            Training("without VIB", seed, "pcmepp", vib=0.0),
            replace(plain, name="without all", vib=0.0),
            Training(PAPERS_START, seed, "pcmepp", chosen=(("scale", 5.0),)),
            Training(WITH_CLIP, seed, "pcmepp", clip=1.0),
            replace(plain, name=PRETRAINING, clip=1.0),
        ]
    return trainings


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.claims", description="Re-test the paper's main claims in miniature.")
    parser.add_argument("--out", type=Path, default=Path("claims"), help="folder of the results (default: claims)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every training (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, one core each (default: 2)")
    parser.add_argument("--choose", action="store_true", help="compare loss scalars and learning rates on validation")
    parser.add_argument("--report", action="store_true", help="train nothing, judge the seeds that are finished")
    options = parser.parse_args(argv)
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)} is too small.", "Give at least 1.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads do not outlive a fork
    from tools.claims.training import Settings

    if options.choose:
        choose(Settings(), options.out, options.workers)
    else:
        run(Settings(), options.out, options.seeds, options.workers, options.report)
    return 0


def run(settings, out: Path, n_seeds: int = 3, workers: int = 2, report_only: bool = False) -> dict:
    """Train what is not there yet, then judge and write; returns what claims.json holds."""
    from probemb.cli.results import claim_files, write_json
    from probemb.files import replace_text
    from tools.claims.findings import Found, judge, markdown_tables, text_tables
    from tools.claims.queue import Kept, train_all
    from tools.claims.report import report

    claim_files(out, ("claims.json", "claims.md", "report.html"), GENERATOR)
    keep = Kept(out, settings)
    seeds, began = list(range(n_seeds)), time.perf_counter()
    if report_only:
        seeds = [seed for seed in seeds if all(keep.read(one) for one in plan([seed]))]
        if not seeds:
            raise UserError(f"No seed is finished in {out}.", "Start without --report to train.")
    trainings = plan(seeds)
    found = train_all(settings, trainings, keep, workers)
    seconds = time.perf_counter() - began
    by_variant = Found(trainings, found, keep.name)
    claims = judge(by_variant)
    print("\n".join(text_tables(claims)), flush=True)
    content = {
        "settings": asdict(settings),
        "seeds": seeds,
        "seconds": seconds,
        "claims": claims,
        "trainings": [{**asdict(training), **found[keep.name(training)]} for training in trainings],
    }
    write_json(out / "claims.json", content, GENERATOR)
    told = describe(settings, len(trainings), seeds)
    replace_text(out / "claims.md", "\n".join([f"<!-- {GENERATOR} -->", told, "", *markdown_tables(claims)]) + "\n")
    report(out / "report.html", claims, by_variant, told, GENERATOR)
    print(f"\n{len(trainings)} trainings, {seconds / 60:.1f} min | {out / 'claims.json'} | {out / 'report.html'}")
    return content


def describe(settings, trainings: int, seeds: Sequence[int]) -> str:
    """What was trained, in two sentences."""
    sizes = settings.sizes
    return (
        f"{trainings} trainings, seeds {', '.join(map(str, seeds))}. Each sees {sizes.training:,} scenes with five "
        f"captions {settings.epochs} times, after a common pretraining on {sizes.pretraining:,} others, and is tested "
        f"on {sizes.test:,} scenes of which every true caption is known."
    )


def choose(settings, out: Path, workers: int) -> None:
    """Print validation mAP@R for the values of GRID and LEARNING_RATES."""
    from tools.claims.queue import Kept, train_all
    from tools.claims.training import CHOSEN, GRID, LEARNING_RATES, Training

    keep = Kept(out, settings)
    seen: dict[str, list[tuple[float, dict]]] = {method: [] for method in GRID}

    def look(grid: dict[str, list[dict]]) -> None:
        trainings = [
            Training(_title(method, value), SELECTION_SEED, method, chosen=tuple(sorted(value.items())))
            for method, values in grid.items()
            for value in values
        ]
        found = train_all(settings, trainings, keep, workers, test=False)
        for training in trainings:
            value = max(found[keep.name(training)]["validation"])
            print(f"{training.name}: {100 * value:.2f}", flush=True)
            seen[training.method].append((value, dict(training.chosen)))

    def best(method: str) -> dict:
        return max(seen[method], key=lambda pair: pair[0])[1]

    first, *others = LEARNING_RATES
    look({method: [{key: one, "lr": first} for one in values] for method, (key, values) in GRID.items()})
    beyond = {}
    for method, (key, values) in GRID.items():
        if best(method)[key] in (values[0], values[-1]):
            end, neighbour = values[:2] if best(method)[key] == values[0] else values[:-3:-1]
            beyond[method] = [{key: end * end / neighbour, "lr": first}]
    look(beyond)
    look({method: [{**best(method), "lr": lr} for lr in others] for method in GRID})
    print("validation mAP@R, the best of each:")
    for method, pairs in seen.items():
        value = max(pair[0] for pair in pairs)
        print(f"  {method}: {100 * value:.2f} with {best(method)}; CHOSEN has {CHOSEN[method]}")


def _title(method: str, value: dict) -> str:
    return f"choose {method} " + " ".join(f"{key} {option:g}" for key, option in sorted(value.items()))
