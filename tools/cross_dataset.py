"""Generalisation across datasets: train on one, measure on the others, for any methods.

    python -m tools.cross_dataset --data flickr8k=data/flickr8k --data coco=data/coco \\
        --methods vse,jwae-mh --out runs/cross -- --config finetune/examples/flickr8k.yaml
    python -m tools.cross_dataset --data flickr30k=dataset_flickr30k.json --images flickr30k=data/flickr30k \\
        --data coco=dataset_coco.json --images coco=data/coco --methods jwae-mh,vae-mh,vsepp --out runs/cross \\
        -- --model.name resnet152-bigru --model.word-vectors glove.840B.300d.txt

Every method is trained on every dataset's training split by `finetune.run` (what follows `--` are its options), and
measured on every dataset's test split by the ranking that it was trained for. Finished trainings are kept, and stopped
ones resume. Writes OUT/METHOD-DATASET-SEED/ (the runs), cross_dataset.json and report.html.
Source: Mahajan et al., jWAE, Tables 5 and 6.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError, nearest
from probemb.runs.preemption import REQUEUE

PROG = "python -m tools.cross_dataset"
GENERATOR = "probemb tools.cross_dataset"
OUTPUTS = ("cross_dataset.json", "report.html")
MEASURED = "cross_dataset.json"  # in a run's folder too: what was measured of its model
KS = (1, 5, 10)


@dataclass
class Dataset:
    """One dataset of the comparison; without `train` it is measured alone."""

    name: str
    path: str
    images: str | None = None
    vocabulary: str | None = None
    train: str | None = "train"
    validation: str | None = "val"
    test: str | None = "auto"


@dataclass(frozen=True)
class Run:
    """A training: of a method, on a dataset, with a seed."""

    method: str
    dataset: str
    seed: int

    def folder(self, out: Path) -> Path:
        """Its run folder."""
        return out / f"{self.method}-{self.dataset}-{self.seed}"


@dataclass
class Plan:
    """Settings of the trainings and measurements."""

    datasets: dict[str, Dataset]
    methods: list[str]
    seeds: int
    out: Path
    options: list[str] = field(default_factory=list)

    def runs(self) -> list[Run]:
        """Method by method, dataset by dataset, seed by seed."""
        trained = [one.name for one in self.datasets.values() if one.train is not None]
        return [Run(m, name, seed) for m in self.methods for name in trained for seed in range(self.seeds)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before anything is trained."""
    plan, device = read_plan(sys.argv[1:] if argv is None else list(argv))
    from probemb.cli.results import claim_files, write_json

    claim_files(plan.out, OUTPUTS, GENERATOR)
    tests = find_tests(plan)
    rows = []
    for run in plan.runs():
        code = train(plan, run)
        if code:
            return code
        rows += measure(plan, run, tests, device)
    table = summarise(rows)
    show(table)
    about = {name: vars(one) for name, one in plan.datasets.items()}
    write_json(plan.out / OUTPUTS[0], {"datasets": about, "rows": rows, "table": table}, GENERATOR)
    from probemb.reports.pages import write_page

    page = Path(__file__).with_name("cross_dataset.html")
    write_page(plan.out / OUTPUTS[1], page, GENERATOR, table=table, seeds=plan.seeds, ks=KS)
    print(f"\nwritten: {plan.out / OUTPUTS[0]}, {plan.out / OUTPUTS[1]}", flush=True)
    return 0


def read_plan(argv: list[str]) -> tuple[Plan, str]:
    """The command line as a plan, and the device to measure on. Raises UserError."""
    from finetune.methods.registry import METHODS

    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="a dataset; two or more")
    for name, text in (
        ("images", "folder of a dataset's images, where its file only names them"),
        ("vocabulary", "of a dataset, for models that read words (default: beside its data)"),
        ("train-split", "split to train on (default: train; none: only measure)"),
        ("validation-split", "split that selects the epoch (default: val; none: the last epoch)"),
        ("test-split", "split to measure on (default: auto: test where there are several, else all; all)"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME=VALUE", help=text)
    parser.add_argument("--methods", default="vse,jwae-mh", help="methods of finetune, with commas (vse,jwae-mh)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each, with seeds from 0 (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/cross-dataset"), help="folder (runs/cross-dataset)")
    parser.add_argument("--device", default="auto", help="to measure on: auto, cpu, cuda, cuda:1 (auto)")
    o = parser.parse_args(own)
    datasets = {name: Dataset(name, path) for name, path in pairs(o.data, "data").items()}
    if len(datasets) < 2:
        raise UserError(f"There are {len(datasets)} datasets to compare.", "Name two with --data NAME=PATH.")
    for option, attribute in (
        ("images", "images"), ("vocabulary", "vocabulary"), ("train_split", "train"),
        ("validation_split", "validation"), ("test_split", "test"),
    ):  # fmt: skip
        for name, value in pairs(getattr(o, option), option.replace("_", "-")).items():
            if name not in datasets:
                known = ", ".join(datasets)
                raise UserError(f"--{option.replace('_', '-')} is of {name}, which is no dataset.", f"Name {known}.")
            setattr(datasets[name], attribute, None if value == "none" else value)
    methods = [name.strip() for name in o.methods.split(",") if name.strip()]
    for name in methods:
        if name not in METHODS or not METHODS[name].trained:
            what = f"There is no method '{name}' to train.{nearest(name, METHODS)}"
            raise UserError(what, "See docs/finetune.md for all of them.")
    if not methods or o.seeds < 1:
        raise UserError("There is nothing to train.", "Name --methods, and at least 1 for --seeds.")
    if all(one.train is None for one in datasets.values()):
        raise UserError("No dataset has a split to train on.", "Leave --train-split out for one of them.")
    return Plan(datasets, list(dict.fromkeys(methods)), o.seeds, o.out, options), o.device


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE options by name. Raises UserError: no name, no value, or a name twice."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name.replace("_", "").isalnum() and equals and value):
            raise UserError(f"--{option} is '{one}'.", f"Write --{option} NAME=VALUE; a name is of letters and digits.")
        if name in found:
            raise UserError(f"--{option} names {name} twice.", "Leave one of them out.")
        found[name] = value
    return found


def find_tests(plan: Plan) -> dict:
    """Every dataset's test captions. Raises UserError: a split or images are missing."""
    from probemb.data.captions.find import find_captions

    found = {}
    for name, one in plan.datasets.items():
        found[name] = find_captions(one.path, None if one.test in (None, "all") else one.test, one.images)
        _ = found[name].images
    return found


def train(plan: Plan, run: Run) -> int:
    """Train what is not finished, by the command; returns its exit code."""
    one, folder = plan.datasets[run.dataset], run.folder(plan.out)
    words = ["--method", run.method, *plan.options, "--data.path", one.path, "--data.train", one.train]
    words += ["--seed", str(run.seed), "--out", str(folder), "--resume"]
    words += ["--data.validation", one.validation] if one.validation else ["--no-data.validation"]
    words += ["--data.images", one.images] if one.images else []
    words += ["--model.vocabulary", one.vocabulary] if one.vocabulary else []
    print(f"\n== {run.method} on {one.name}, seed {run.seed}", flush=True)
    code = run_to_the_end([sys.executable, "-m", "finetune.run", *words])
    if code == REQUEUE:
        print("stopped; the same command continues", flush=True)
    return code


def run_to_the_end(words: list[str]) -> int:
    """The exit code of a command, to which SIGTERM is passed on: it saves before it ends."""
    with subprocess.Popen(words) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def measure(plan: Plan, run: Run, tests: dict, device: str) -> list[dict]:
    """Retrieval of a run's model on every test split; kept beside the model for as long as its weights are the same."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.rankings import evaluate_retrieval
    from probemb.models import as_one, load_model, networks_of

    folder = run.folder(plan.out)
    weights = [tensors_of(Path(name)) for name in networks_of(folder)]
    kept = read_kept(folder / MEASURED, weights)
    missing = [name for name in tests if name not in kept or kept[name]["source"] != identity(tests[name])]
    if missing:
        chosen = choose_device(device, "auto")
        loaded = [load_model(name, chosen.name) for name in networks_of(folder)]
        model, first = as_one([one.model for one in loaded]), loaded[0]
        embedder = Embedder(model, first.tokenizer, first.transforms.evaluate, chosen, workers=None, show=progress)
        for name in missing:
            kept[name] = {"source": identity(tests[name]), **evaluate_retrieval(embedder, tests[name])}
        write_json(folder / MEASURED, {"weights": weights, "measured": kept}, GENERATOR)
    where = {"method": run.method, "trained": run.dataset, "seed": run.seed}
    return [{**where, "measured": name, **kept[name]} for name in tests]


def identity(captions) -> dict:
    """Identity of the test captions, to tell whether they are the same as before."""
    from hashlib import sha256

    texts = sha256("\n".join(captions.flat()).encode("utf-8", "replace")).hexdigest()
    return {"data": captions.source, "split": captions.split, "captions_sha256": texts}


def tensors_of(model: Path) -> str:
    """Digest of a model's weights, in the folder of a run or of the model itself."""
    folder = model / "model" if (model / "model").is_dir() else model
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["tensors_sha256"]


def read_kept(path: Path, weights: list[str]) -> dict:
    """Earlier results for exactly these weights; empty if there are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["measured"] if content["weights"] == weights else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def summarise(rows: Sequence[dict]) -> list[dict]:
    """Means over seeds of every method, training and test set, in percent, and what is kept of training there.

    "kept" is the RSUM over that of the same method trained on the dataset that is measured.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["trained"], row["measured"]), []).append(row)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    table = []
    for (method, trained, measured), group in groups.items():
        total = mean([row["rsum"] for row in group])
        at_home = groups.get((method, measured, measured))
        line = {"method": method, "trained": trained, "measured": measured, "seeds": len(group), "rsum": total}
        for way in ("i2t", "t2i"):
            line |= {f"{way}_r{k}": 100 * mean([row[way][f"r@{k}"] for row in group]) for k in KS}
        line["kept"] = total / mean([row["rsum"] for row in at_home]) if at_home else None
        table.append(line)
    return sorted(table, key=lambda line: (line["measured"], line["trained"] == line["measured"], line["trained"]))


def show(table: Sequence[dict]) -> None:
    """Print it, percent."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="trained on one dataset, measured on another, percent")
    for heading in ("measured on", "trained on", "method"):
        shown.add_column(heading)
    for heading in (*(f"{way} R@{k}" for way in ("i→t", "t→i") for k in KS), "RSUM", "kept"):
        shown.add_column(heading, justify="right")
    for line in table:
        recalls = [f"{line[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in KS]
        kept = "" if line["kept"] is None else f"{100 * line['kept']:.0f}"
        shown.add_row(line["measured"], line["trained"], line["method"], *recalls, f"{line['rsum']:.1f}", kept)
    console = Console()
    (console if console.is_terminal else Console(width=132)).print(shown)


if __name__ == "__main__":
    run_command(main)
