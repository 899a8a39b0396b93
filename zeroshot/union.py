"""Crops A, B and their union: does uncertainty know what fits more, and are queries told from parts of them?

    python -m zeroshot.union --model runs/x --data data/visual_genome --images data/visual_genome
    python -m zeroshot.union --model runs/scenes --data data/scenes/visual_genome       # make_scenes --boxes

Of the ten largest regions below an area, A is the largest, B the one that overlaps A least, C the box around both, with
the caption "a and b". Prints the mean uncertainty of A, B and C as images and as captions, and how often a query is
closer to its own item than to the other one of A and C; writes results.json and report.html. Source: Probabilistic
VSE++/VSRN §4.6, Fig. 2, Table 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.crops import UNION_GENERATOR, UnionConfig

if TYPE_CHECKING:
    from probemb.data.boxes import PhraseDataset
    from probemb.evaluation.analyses.unions import EmbeddedTriplets

PROG = "python -m zeroshot.union"
DESCRIPTION = (
    "Uncertainty of crops and of their union, as images and as captions, and binary selection among them; prints "
    "tables and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(UnionConfig, PROG, DESCRIPTION, argv)
    rankings = check(config)
    from probemb.cli.results import claim_files, results_folder
    from probemb.data.boxes.find import find_phrases

    data = find_phrases(config.data, None, config.images, config.sample)
    out = results_folder(config.out, config.model, "union", "zeroshot-results/union")
    claim_files(out, OUTPUTS, UNION_GENERATOR)
    evaluate(config, data, rankings, out)
    return 0


def check(config: UnionConfig) -> list[str]:
    """The rankings of --rankings, or an empty list; refuses options that are missing or cannot be used."""
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", "Visual Genome's descriptions")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/x --data PATH`.")
    if not config.areas:
        raise UserError("--areas names none.", "Give shares of the image, such as [0.1, 0.3, 0.5].")
    if config.rankings is None:
        return []
    from probemb.evaluation.rankings import ranking_names

    names = ranking_names(config.rankings)
    for name in names:
        if name.startswith("faiss") or name == "tolerance":
            raise UserError(f"The ranking {name} scores no single pairs.", "Choose csd, mean, kl, wasserstein2, ...")
        if name == "attention":
            raise UserError(
                "The ranking attention compares tokens, which this command does not keep.", "Choose csd, mean, ..."
            )
    return names


def evaluate(config: UnionConfig, data: PhraseDataset, rankings: list[str], out: Path) -> None:
    """Load the model, embed the triplets, and write the results into `out`."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.evaluation.analyses.unions import embed_triplets
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.rankings import RankingOptions, fitting
    from probemb.models import check_images, load_model
    from probemb.models.architectures import reads_regions
    from zeroshot.reports.union import write_report

    device = choose_device(config.device, config.precision)
    model, tokenizer, transforms = load_model(config.model, device.name, config.resize)
    if reads_regions(model.config["architecture"]):
        raise UserError(
            f"{config.model} reads precomputed regions, and this command crops images.",
            "Name a model that reads pixels.",
        )
    check_images(model, data.images)
    own = "mean" if model.ranking == "attention" else model.ranking
    both = dict.fromkeys([own, *(["mean"] if model.n_embeddings == 1 else [])])
    rankings = fitting(rankings or list(both), model, given=True)
    embedder = Embedder(
        model, tokenizer, transforms.evaluate, device, config.batch_size, config.text_batch_size, config.workers,
        config.max_bad, progress,
    )  # fmt: skip
    found, bad = embed_triplets(embedder, data, sorted(set(config.areas)))
    if bad:
        print(describe_bad(bad), flush=True)
    options = RankingOptions(*model.match_numbers(), config.samples, device=device.name)
    results = {
        "config": to_dict(config),
        "device": device.name,
        "precision": device.precision,
        "probabilistic": model.probabilistic,
        "images_left_out": [{"name": name, "reason": reason} for name, reason in bad],
        "areas": [describe(area, one, rankings, options, model.probabilistic) for area, one in found.items()],
    }
    print_tables(results)
    write_json(out / OUTPUTS[0], results, UNION_GENERATOR)
    write_report(out / OUTPUTS[1], results, data, found)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def describe(area: float, found: EmbeddedTriplets, rankings: Sequence[str], options, probabilistic: bool) -> dict:
    """The content of results.json for one area."""
    from probemb.evaluation.analyses.unions import binary_selection, union_uncertainty
    from probemb.evaluation.rankings import TITLES

    return {
        "area": area,
        "triplets": len(found.triplets),
        "uncertainty": union_uncertainty(found) if probabilistic else None,
        "selection": [
            {"ranking": name, "title": TITLES[name], **binary_selection(found, name, options)} for name in rankings
        ],
    }


# ------------------------------------------------------------------------------------------------------- output


def print_tables(results: dict) -> None:
    """Uncertainty of A, B and C, and binary selection, for every area."""
    from rich.console import Console
    from rich.table import Table

    from probemb.evaluation.analyses.unions import ITEMS, SIDES, TASKS

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    if results["probabilistic"]:
        table = Table(title="uncertainty: log-determinant of the covariance, mean over the triplets")
        for heading in ("area", "triplets", "of", *ITEMS, "C - A", "C larger, %"):
            table.add_column(heading, justify="left" if heading == "of" else "right")
        for row in results["areas"]:
            for side in SIDES:
                u = row["uncertainty"]["log-det"][side]
                cells = [text(u[item], digits=2) for item in (*ITEMS, "difference")]
                start = (f"{row['area']:.0%}", f"{row['triplets']:,}") if side == SIDES[0] else ("", "")
                table.add_row(*start, side, *cells, text(u["larger"], 100), end_section=side == SIDES[-1])
        console.print(table)
    table = Table(title="binary selection between A and C, percent; 50 by chance")
    for heading in ("area", "ranked by", *TASKS, "mean"):
        table.add_column(heading, justify="left" if heading == "ranked by" else "right")
    for row in results["areas"]:
        for i, one in enumerate(row["selection"]):
            cells = [text(one[task], 100) for task in (*TASKS, "mean")]
            last = i + 1 == len(row["selection"])
            table.add_row("" if i else f"{row['area']:.0%}", one["title"], *cells, end_section=last)
    console.print(table)


def text(estimate: dict, scale: float = 1.0, digits: int = 1) -> str:
    """{"value", "se"} as "51.2 ± 0.4"."""
    se = "" if estimate["se"] is None else f" ± {scale * estimate['se']:.{digits}f}"
    return f"{scale * estimate['value']:.{digits}f}{se}"


if __name__ == "__main__":
    run_command(main)
