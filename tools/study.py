"""Run command lines over seeds, and tabulate what they measured.

    python -m tools.study tools/studies/claims.yaml --out claims --workers 2          # run again to resume
    python -m tools.study tools/studies/methods-flickr8k.yaml --set data=data/flickr8k --only vse,pcmepp --out OUT
    python -m tools.study tools/studies/methods-flickr8k.yaml --table docs/numbers/methods-flickr8k.csv

    title, notes: printed above and below the table
    variables: {data: null, epochs: 4}        # {data} in a command line; null has to be set: --set data=PATH
    prepare: [COMMAND LINE, ...]              # once, or for every seed if {seed} is in it; writes into {shared}
    commands: [COMMAND LINE, ...]             # for every row and seed; write into {out}
    rows: {NAME: {title: ..., VARIABLE: VALUE, cost: 2}}  # in place of variables; cost: time, relative to others
    numbers: {NAME: {read: "retrieval/results.json: rows[ranking=csd].i2t.r@1", factor: 100, digits: 1}}  # under {out}
    comparisons: [{title: ..., numbers: [NAME, ...], pairs: [[A, B], ...]}]  # each a family; B a row or a number

A finished (row, seed) is kept; an interrupted one starts again in the same folder, so trainings take --resume. Several
`read` are averaged. Differences are paired over seeds, with 95 % intervals of Student's t; † marks those that Holm's
correction for the tests of their family does not keep.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from probemb import __version__
from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Processes
from probemb.errors import UserError, names_of, nearest
from probemb.files import replace_text
from probemb.machine import cores
from probemb.reports.results import claim_files, provenance, write_json

GENERATOR = "probemb tools.study"
TELL_EVERY = 60.0  # seconds
LEVEL = 0.05
COLUMNS = 8  # of a printed table, at most
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pandas", "scipy.stats", "open_clip", "matplotlib.figure", "sklearn.linear_model"])


@dataclass
class Study:
    """A YAML file."""

    rows: dict[str, dict]
    numbers: dict[str, dict]
    title: str = ""
    notes: str = ""
    variables: dict[str, object] = field(default_factory=dict)
    prepare: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    comparisons: list[dict] = field(default_factory=list)

    def fill(self, text: str, row: str | None, seed: int | str) -> str:
        """Text with its variables, the row's own first; {out} and {shared} stay. Raises UserError: one is not set."""
        known = {"out": "{out}", "shared": "{shared}", "seed": seed, **self.variables, **self.rows.get(row, {})}

        def value(match: re.Match) -> str:
            if known.get(match[1]) is None:
                raise UserError(f"{match[1]} is not set: {text}", f"Add --set {match[1]}=VALUE.")
            return str(known[match[1]])

        while (filled := re.sub(r"\{(\w+)\}", value, text)) != text:
            text = filled
        return text


def read_study(path: Path, settings: Sequence[str]) -> Study:
    """A study with its variables set, NAME=VALUE. Raises UserError: the file is no study, or lacks a variable."""
    if not path.is_file():
        raise UserError(f"There is no study {path}.", "Name one of tools/studies, or a file of your own.")
    try:
        study = Study(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise UserError(f"{path} is no study: {error}", "See `python -m tools.study --help`.") from error
    for name, _, text in (one.partition("=") for one in settings):
        if name not in study.variables:
            known = ", ".join(study.variables)
            raise UserError(f"There is no variable '{name}'.{nearest(name, study.variables)}", f"Set {known}.")
        study.variables[name] = text
    return study


@dataclass(frozen=True)
class Job:
    """Command lines that run one after another, when `after` is finished; `before`: those that they depend on."""

    name: str
    out: Path
    commands: list[str]
    row: str | None = None
    seed: int = 0
    before: list[str] = field(default_factory=list)
    cost: float = 1.0
    after: Job | None = None

    def file(self, kind: str, ending: str = "") -> Path:
        """OUT/KIND/NAME + ending; the folder exists."""
        (self.out / kind).mkdir(parents=True, exist_ok=True)
        return self.out / kind / f"{self.name}{ending}"

    def record(self) -> dict | None:
        """before, commands, seconds, date, machine and version, if the job is finished."""
        file = self.file("finished", ".json")
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def jobs_of(study: Study, out: Path, rows: Sequence[str], seeds: Sequence[int]) -> tuple[list[list[Job]], list[Job]]:
    """Preparations, one step after another, and the rest: a last step of every seed by itself, and the rows.

    Rows come seed after seed, so that a first seed is complete early, and start when their seed is prepared.
    """
    lines = [filled for line in study.prepare if (filled := study.fill(line, None, "{seed}"))]
    before = {seed: [line.replace("{seed}", str(seed)) for line in lines] for seed in seeds}
    steps, jobs = [], []
    for i, line in enumerate(lines):
        names = {f"prepare-{i + 1}" + f"-seed-{seed}" * ("{seed}" in line): before[seed][i] for seed in seeds}
        steps.append([Job(name, out, [command]) for name, command in names.items()])
    last = steps.pop() if lines and "{seed}" in lines[-1] else [None] * len(seeds)
    for seed, prepared in zip(seeds, last):
        for row in rows:
            commands = [filled for line in study.commands if (filled := study.fill(line, row, seed))]
            name = f"{re.sub('[^-+.=_a-zA-Z0-9]', '-', row)}-seed-{seed}"
            jobs.append(Job(name, out, commands, row, seed, before[seed], study.rows[row].get("cost", 1.0), prepared))
    return steps, [*filter(None, last), *jobs]


class Runner:
    """Runs jobs, several at a time. Ctrl-C and SIGTERM end their processes, which save what they can."""

    def __init__(self, workers: int, rerun: bool):
        self.workers, self.rerun, self.processes, self.stopped = workers, rerun, set(), False
        self.failed: list[Job] = []
        self.clock: dict[str, float] = {}

    def run(self, every: Sequence[Job]) -> list[Job]:
        """Run those that are not finished, telling how long; returns those that failed."""
        left, failed, began = [job for job in every if self.is_left(job)], self.failed, time.monotonic()

        def tell(what: str) -> None:
            seconds = self.seconds_left([job for job in left if job not in failed], every)
            rest = "estimating" if seconds is None else f"about {timedelta(seconds=int(seconds))} left"
            done = sum(job.record() is not None for job in every)
            took = timedelta(seconds=int(time.monotonic() - began))
            print(f"[{done}/{len(every)} | {took} | {rest}] {what}", flush=True)

        with ThreadPoolExecutor(self.workers) as pool:
            running = {pool.submit(self.run_one, job): job for job in left}
            try:
                while running:
                    done, _ = wait(running, TELL_EVERY, FIRST_COMPLETED)
                    for future in done:
                        job = running.pop(future)
                        if error := future.result():
                            failed.append(job)
                            print(error, file=sys.stderr, flush=True)
                        else:
                            tell(f"{job.name}: {job.record()['seconds']:.0f} s")
                    if not done:
                        tell(f"running {', '.join(job.name for job in running.values() if job.name in self.clock)}")
            except BaseException:
                self.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.processes):
                    process.terminate()
                raise
        return failed

    def is_left(self, job: Job) -> bool:
        """True if a job is not finished. Raises UserError: it is, with other command lines."""
        record, now = job.record(), [*job.before, *job.commands]
        if record and (was := [*record["before"], *record["commands"]]) != now:
            if not self.rerun:
                told = "\n".join([f"{job.name} is finished with another command line.", *sorted({*was} ^ {*now})])
                raise UserError(told, "Add --rerun to run it again, or name another --out.")
            shutil.rmtree(job.file("rows"), ignore_errors=True)
            job.file("finished", ".json").unlink()
        return job.record() is None

    def run_one(self, job: Job) -> str | None:
        """The error, if a command failed."""
        while job.after and job.after.record() is None:
            if self.stopped or job.after in self.failed:
                return f"{job.name} was not started: {job.after.name} is not finished."
            time.sleep(0.5)
        began = self.clock[job.name] = time.monotonic()
        own, shared = str(job.file("rows")), str(job.out / "shared")
        for command in job.commands:
            words = [word.replace("{out}", own).replace("{shared}", shared) for word in shlex.split(command)]
            with job.file("logs", ".log").open("a+", encoding="utf-8") as log:
                print("$", shlex.join(words), file=log, flush=True)
                process = FORKS.Process(target=_become, args=(words, log.name))
                process.start()
                self.processes.add(process)
                if self.stopped:
                    process.terminate()
                process.join()
                if code := process.exitcode:
                    log.seek(0)
                    last = "".join(f"\n    {line}" for line in log.read().splitlines()[-5:])
                    return f"{job.name} ended with code {code}: {shlex.join(words)}{last}\n    all of it: {log.name}"
        content = {"before": job.before, "commands": job.commands, "seconds": time.monotonic() - began}
        content |= {"date": provenance()["date"], "version": __version__}
        content["machine"] = f"{platform.platform()}, {cores()} cores"
        replace_text(job.file("finished", ".json"), json.dumps(content, indent=1) + "\n")
        return None

    def seconds_left(self, left: Sequence[Job], every: Sequence[Job]) -> float | None:
        """Expected time until all are finished; None before the first one is.

        A row takes what its other seeds took, else its cost at the mean rate; a worker that is free takes the next job.
        """
        took = [(job, record["seconds"]) for job in every if (record := job.record())]
        loads = [0.0] * self.workers
        for job in (job for job in left if took and job.record() is None):
            rate = sum(seconds for _, seconds in took) / sum(one.cost for one, _ in took)
            expected = fmean([seconds for one, seconds in took if one.row == job.row and job.row] or [job.cost * rate])
            spent = time.monotonic() - self.clock.get(job.name, time.monotonic())
            heapq.heapreplace(loads, loads[0] + max(0.0, expected - spent))
        return max(loads) if took else None


def _become(words: list[str], log: str) -> None:
    """Run a command in this process, which is forked from one that has imported what takes five seconds of CPU."""
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if words[:2] != ["python", "-m"]:
        os.execvp(sys.executable if words[0] == "python" else words[0], words)
    multiprocessing.set_start_method(None, force=True)  # of workers: as without a server
    sys.argv[:] = words[2:]
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def look_up(folder: Path, where: str) -> float:
    """`FILE: a.b[2].c` or `FILE: rows[ranking=csd,k=2].rsum` in a JSON file; NaN where there is no such thing."""
    name, path = where.split(": ", 1)
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        for key, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
            if "=" in index:
                wanted = [part.partition("=")[::2] for part in re.split(r",(?=\w+=)", index)]
                content = next(one for one in content if all(str(one.get(k)) == value for k, value in wanted))
            else:
                content = content[key or int(index)]
        return float(content)
    except (OSError, LookupError, TypeError, StopIteration):
        return math.nan


def measured(study: Study, jobs: Sequence[Job]) -> pd.DataFrame:
    """Columns row, seed, the numbers, and seconds, of the finished jobs."""
    lines = []
    for job in (job for job in jobs if job.record()):
        line = {"row": job.row, "seed": job.seed}
        for name, number in study.numbers.items():
            reads = [number["read"]] if isinstance(number["read"], str) else number["read"]
            line[name] = fmean(look_up(job.file("rows"), study.fill(one, job.row, job.seed)) for one in reads)
        lines.append({**line, "seconds": round(job.record()["seconds"], 1)})
    return pd.DataFrame(lines)


def paired(differences: Sequence[float]) -> dict[str, float]:
    """Mean, its 95 % interval by Student's t ("low", "high") and two-sided p; NaN for one seed."""
    n, mean = len(differences), fmean(differences)
    if n == 1:
        return {"mean": mean, "low": math.nan, "high": math.nan, "p": math.nan}
    error = math.sqrt(sum((x - mean) ** 2 for x in differences) / (n - 1) / n)
    half = float(student.ppf(1 - LEVEL / 2, n - 1)) * error
    ratio = abs(mean) / error if error else math.inf if mean else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": float(2 * student.sf(ratio, n - 1))}


def holm(ps: Sequence[float]) -> list[bool]:
    """Rejected hypotheses of a family; NaN is none."""
    order = sorted((i for i, p in enumerate(ps) if p == p), key=ps.__getitem__)
    kept = [rank for rank, i in enumerate(order) if ps[i] > LEVEL / (len(order) - rank)]
    return [i in order[: kept[0] if kept else len(order)] for i in range(len(ps))]


def compare(study: Study, table: pd.DataFrame) -> list[dict]:
    """All comparisons of rows with numbers of the same seeds: family, a, b, number, seeds, `paired` and "holm"."""
    found = []
    for family in study.comparisons:
        tested = []
        for (a, b), number in itertools.product(family["pairs"], family["numbers"]):
            ours, theirs = (table[table.row == one].set_index("seed")[number] for one in (a, b))
            differences = (ours - (theirs if isinstance(b, str) else b)).dropna().tolist()
            if differences:
                about = {"family": family["title"], "a": a, "b": b, "number": number, "seeds": len(differences)}
                tested.append({**about, **paired(differences)})
        found += [{**one, "holm": kept} for one, kept in zip(tested, holm([one["p"] for one in tested]))]
    return found


def show(study: Study, table: pd.DataFrame, compared: Sequence[dict]) -> None:
    """Print rows with mean ± SD over the seeds, and the differences of each family."""

    def text(number: str, value: float, sign: str = "", more: int = 0) -> str:
        form = {"factor": 1, "digits": 1, **study.numbers[number]}
        return f"{form['factor'] * value:{sign}.{form['digits'] + more}f}".replace("-", "−")

    def cell(number: str, values: pd.Series) -> str:
        spread = f" ± {text(number, values.std())}" if len(values) > 1 else ""
        return text(number, values.mean()) + spread if len(values) else "–"

    def difference(one: dict) -> str:
        mean, low, high = (text(one["number"], one[key], "+", 1) for key in ("mean", "low", "high"))
        told = "\nnot told apart" if one["low"] <= 0 <= one["high"] else "" if one["holm"] else " †"
        return f"{mean} (one seed)" if one["seeds"] == 1 else f"{mean} \\[{low}, {high}]{told}"

    def grid(title: str, names: Sequence[str], rows: dict[str, dict[str, str]]) -> None:
        for first in range(0, max(1, len(names)), COLUMNS):
            some = names[first : first + COLUMNS]
            shown = Table("", *some, title=title)
            for head, cells in rows.items():
                shown.add_row(head, *(cells.get(name, "") for name in some))
            console.print(shown)

    console = Console()
    console = console if console.is_terminal else Console(width=200)
    titles, rows = {row: study.rows.get(row, {}).get("title", row) for row in table.row}, {}
    for row, title in titles.items():
        rows[title] = {name: cell(name, table[table.row == row][name].dropna()) for name in study.numbers}
    grid(study.title, list(study.numbers), rows)
    for family in dict.fromkeys(one["family"] for one in compared):
        names, pairs = {}, {}
        for one in (one for one in compared if one["family"] == family):
            pair = f"{titles[one['a']]} over {titles.get(one['b'], one['b'])}"
            pairs.setdefault(pair, {})[one["number"]] = difference(one)
            names[one["number"]] = None
        grid(family, list(names), pairs)
    print(study.notes, flush=True)
    for number in study.numbers:
        if table[number].isna().all():
            print(f"No row has {number}: {study.numbers[number]['read']}", flush=True)


def write_results(study: Study, jobs: Sequence[Job], table: pd.DataFrame, compared: Sequence[dict], out: Path) -> None:
    """OUT/results.json and OUT/results.csv, one line for every row and seed."""
    records = {(job.row, job.seed): job.record() for job in jobs}
    rows = [{**records[line["row"], line["seed"]], **line} for line in table.to_dict("records")]
    write_json(out / "results.json", {"title": study.title, "rows": rows, "comparisons": compared}, GENERATOR)
    about = provenance()
    head = f"# {GENERATOR} {about['version']}: {about['command']}; {about['date']}; {rows[-1]['machine']}\n"
    replace_text(out / "results.csv", head + table.to_csv(index=False))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.study", description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="a YAML file, such as those of tools/studies")
    parser.add_argument("--out", type=Path, help="folder (default: runs/ and the study's name)")
    parser.add_argument("--seeds", type=Processes, default=3, help="of every row, from 0 on (default: 3)")
    parser.add_argument("--workers", type=Processes, default=1, help="jobs at a time (default: 1)")
    parser.add_argument("--only", help="rows, separated by commas (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the study")
    parser.add_argument("--rerun", action="store_true", help="rerun jobs whose command lines have changed")
    parser.add_argument("--table", type=Path, metavar="CSV", help="run nothing: a table of an earlier results.csv")
    o = parser.parse_args(argv)
    study = read_study(o.study, o.set)
    if o.table:
        if not o.table.is_file():
            raise UserError(f"--table {o.table} is no file.", "Name a results.csv of this study.")
        columns = ["row", "seed", *study.numbers]
        table = pd.read_csv(o.table, comment="#", dtype={"row": str}).reindex(columns=columns)
        show(study, table, compare(study, table))
        return 0
    rows = names_of(o.only, study.rows, "row") if o.only else list(study.rows)
    out = (o.out or Path("runs") / o.study.stem).absolute()
    claim_files(out, ("results.json", "results.csv"), GENERATOR)
    steps, jobs = jobs_of(study, out, rows, range(o.seeds))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // o.workers)))  # before their processes load torch
    runner = Runner(o.workers, o.rerun)
    if any(runner.run(step) for step in steps):
        raise UserError("A preparation failed, which every row needs.", "Mend it, and start again.")
    failed = runner.run(jobs)
    of_rows = [job for job in jobs if job.row]
    if any(job.record() for job in of_rows):
        table = measured(study, of_rows)
        compared = compare(study, table)
        show(study, table, compared)
        write_results(study, of_rows, table, compared, out)
        print(f"written: {out / 'results.json'}, {out / 'results.csv'}", flush=True)
    if failed:
        told = f"{len(failed)} of {len(jobs)} failed: {', '.join(job.name for job in failed)}."
        raise UserError(told, "Mend them, and start again: what is finished is kept.")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_command(main)
