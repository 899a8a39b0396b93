"""Phrase localisation: find what a phrase means among the proposals of its image.

    python -m zeroshot.localisation --model runs/x --data data/flickr30k_entities --proposals edge_boxes.json --top 200
    python -m zeroshot.localisation --model runs/x --data data/visual_genome --sample 1000
    python -m zeroshot.localisation --model runs/scenes --data data/scenes/entities               # synthetic data
    python -m zeroshot.localisation --model runs/scan --data data/flickr30k_entities --regions boxes/test_ims.npy

Every proposal is cropped and embedded as an image of its own, or for a model that reads regions its features are taken
from a file; a phrase ranks the proposals of its image. Prints recall
at 1, 5 and 10 for an IoU of at least 0.5, by type of phrase, with the upper bound of the proposals and what guessing
would reach; writes results.json and report.html. Source: jWAE §5.2, Table 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.crops import LOCALISATION_GENERATOR, LocalisationConfig

if TYPE_CHECKING:
    from probemb.cli.device import Device
    from probemb.data.boxes import PhraseDataset
    from probemb.data.boxes.proposals import Proposals
    from probemb.evaluation.analyses.localisation import Localised
    from probemb.models.dual_encoder import DualEncoder

PROG = "python -m zeroshot.localisation"
DESCRIPTION = (
    "Phrase localisation: recall of the proposals that a phrase ranks first, by type of phrase, and the value of "
    "uncertainty; prints a table and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")
IOUS = tuple(i / 20 for i in range(2, 20))  # 0.1 to 0.95
UNTYPED = "all"
WRITE = "python -m tools.write_regions --proposals"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(LocalisationConfig, PROG, DESCRIPTION, argv)
    rankings = check(config)
    from probemb.cli.results import claim_files, results_folder
    from probemb.data.boxes import find_phrases
    from probemb.data.boxes.proposals import grid_proposals, read_proposals, read_region_proposals

    data = find_phrases(config.data, config.split, config.images, config.sample)
    if config.regions is not None:
        proposals = read_region_proposals(config.regions, data, config.top)
    elif config.proposals is None:
        proposals = grid_proposals(data, config.grid.scales, config.grid.ratios, config.grid.step)
    else:
        proposals = read_proposals(config.proposals, data, config.top)
    out = results_folder(config.out, config.model, "localisation", "zeroshot-results/localisation")
    claim_files(out, OUTPUTS, LOCALISATION_GENERATOR)
    evaluate(config, data, proposals, rankings, out)
    return 0


def check(config: LocalisationConfig) -> list[str]:
    """The rankings of --rankings, or an empty list; refuses options that are missing or have no effect."""
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", "phrases with boxes")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/x --data PATH`.")
    if config.proposals is not None and config.regions is not None:
        raise UserError("--regions has proposals of its own, and --proposals is given.", "Leave --proposals out.")
    file = config.proposals or config.regions
    if file is None and config.top is not None:
        raise UserError("--top is given without --proposals.", "Name a file of proposals, or change --grid.step.")
    if file is not None and config.grid != type(config.grid)():
        raise UserError("--grid has no effect on proposals of a file.", "Leave --grid or the file out.")
    if config.rankings is None:
        return []
    from probemb.evaluation.rankings import ranking_names

    names = ranking_names(config.rankings)
    for name in names:
        if name.startswith("faiss") or name == "tolerance":
            raise UserError(f"The ranking {name} is not for proposals.", "Choose csd, mean, match-probability, kl, ...")
    return names


def evaluate(
    config: LocalisationConfig, data: PhraseDataset, proposals: Proposals, rankings: list[str], out: Path
) -> None:
    """Load the model, localise, and write the results into `out`."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.evaluation.analyses.localisation import localise
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.rankings import RankingOptions, fitting
    from probemb.models import load_model
    from zeroshot.reports.localisation import write_report

    device = choose_device(config.device, config.precision)
    model, tokenizer, transforms = load_model(config.model, device.name, config.resize)
    check_inputs(model, proposals)
    rankings = fitting(rankings or default_rankings(model), model, bool(rankings))
    print(
        f"{len(data):,} images, {len(data.phrases):,} phrases, {proposals.total / len(data):,.0f} proposals an image "
        f"({proposals.source}), on {device.name} in {device.precision}",
        flush=True,
    )
    embedder = Embedder(
        model, tokenizer, transforms.evaluate, device, config.batch_size, config.text_batch_size, config.workers,
        config.max_bad, progress,
    )  # fmt: skip
    options = RankingOptions(*model.match_numbers(), config.samples, device=device.name, attention=model.attention)
    found = localise(embedder, data, proposals, rankings, options, config.several)
    if found.bad:
        print(describe_bad(found.bad), flush=True)
    results = describe(config, data, proposals, found, model, device)
    print_tables(results)
    write_json(out / OUTPUTS[0], results, LOCALISATION_GENERATOR)
    write_report(out / OUTPUTS[1], results, data, proposals, found)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def check_inputs(model: DualEncoder, proposals: Proposals) -> None:
    """Refuse crops for a model that reads regions, the reverse, and regions of another width. Raises UserError."""
    wanted = getattr(model.image_tower, "region_shape", None)
    given = proposals.features and proposals.features.shape
    if wanted is None and given is not None:
        raise UserError(
            f"The model reads pixels, and {proposals.source} holds features of regions.",
            "Leave --regions out, or name a model that reads regions.",
        )
    if wanted is not None and given is None:
        raise UserError(
            f"The model reads regions of {wanted[1]} numbers, and crops of images are pixels.",
            f"Name the proposals' features with --regions; `{WRITE}` writes them.",
        )
    if wanted is not None and wanted[1] != given[1]:
        raise UserError(
            f"The model reads regions of {wanted[1]} numbers, and {proposals.source} has regions of {given[1]}.",
            f"Write them with what the training's regions came from (`{WRITE}`).",
        )


def default_rankings(model: DualEncoder) -> list[str]:
    """The ranking that the model was trained for, and the means alone."""
    return list(dict.fromkeys([model.ranking, *(["mean"] if model.n_embeddings == 1 else [])]))


def describe(
    config: LocalisationConfig, data: PhraseDataset, proposals: Proposals, found: Localised, model: DualEncoder,
    device: Device,
) -> dict:  # fmt: skip
    """The content of results.json. Recalls are shares in [0, 1], with standard errors over images."""
    from probemb.evaluation.predictors import assess
    from probemb.metrics import uncertainty_bins
    from probemb.metrics.localisation import recall_at, recall_over_thresholds

    first = next(iter(found.first_overlaps))
    hit = recall_at(found.first_overlaps[first], 1).double()
    bins = uncertainty_bins(found.u, hit) if model.probabilistic else None
    return {
        "config": to_dict(config) | {"split": data.split},
        "device": device.name,
        "precision": device.precision,
        "probabilistic": model.probabilistic,
        "images": len(found.image.unique()),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in found.bad],
        "phrases": len(found.rows),
        "phrases_without_box": data.without_box,
        "proposals": {"source": proposals.source, "total": proposals.total, "dropped": proposals.dropped},
        "rows": summary(found),
        "types": by_type(found, [data.phrases[row].kind or UNTYPED for row in found.rows], first),
        "thresholds": {"iou": list(IOUS)}
        | recall_over_thresholds(found.first_overlaps[first], found.best_overlap, IOUS),
        "uncertainty": asdict(bins) if bins else None,
        "predictors": assess(found.scores, hit, found.image),
    }


def summary(found: Localised) -> list[dict]:
    """A row for each ranking, then guessing, then the upper bound; each metric with "value" and "se"."""
    from probemb.evaluation.rankings import TITLES
    from probemb.metrics.localisation import KS, THRESHOLD, recall_at, summarise

    rows = []
    for name, overlaps in found.first_overlaps.items():
        hits = {f"r@{k}": recall_at(overlaps, k) for k in KS}
        rows.append({"ranking": name, "title": TITLES[name], **summarise(hits, found.image)})
    guessed = {f"r@{k}": found.chance[:, i] for i, k in enumerate(KS)}
    rows.append({"ranking": None, "title": "guessing", **summarise(guessed, found.image)})
    bound = {f"r@{k}": found.best_overlap >= THRESHOLD for k in KS}
    rows.append({"ranking": None, "title": "upper bound of the proposals", **summarise(bound, found.image)})
    return rows


def by_type(found: Localised, kinds: list[str], ranking: str) -> list[dict]:
    """Recall under one ranking, guessing, upper bound and mean u for each type of phrase, frequent ones first.

    A phrase of several types, "people/clothing", counts for each.
    """
    import torch

    from probemb.metrics.localisation import KS, THRESHOLD, recall_at, summarise

    outcomes = {f"r@{k}": recall_at(found.first_overlaps[ranking], k) for k in KS}
    outcomes |= {"guessing": found.chance[:, 0], "upper_bound": found.best_overlap >= THRESHOLD, "u": found.u}
    rows = []
    for kind in sorted({one for several in kinds for one in several.split("/")}):
        some = torch.tensor([kind in several.split("/") for several in kinds])
        rows.append({"type": kind, "phrases": int(some.sum()), **summarise(outcomes, found.image, some)})
    return sorted(rows, key=lambda row: -row["phrases"])


# ------------------------------------------------------------------------------------------------------- output


def print_tables(results: dict) -> None:
    """Recall by ranking and by type of phrase, in percent, and what u knows."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    metrics = ("r@1", "r@5", "r@10")
    table = Table(title=f"phrase localisation, {results['phrases']:,} phrases in {results['images']:,} images, percent")
    table.add_column("ranked by")
    for name in metrics:
        table.add_column(name.upper(), justify="right")
    for row in results["rows"]:
        table.add_row(row["title"], *(share(row[name]) for name in metrics), style=None if row["ranking"] else "dim")
    console.print(table)
    table = Table(title=f"by type, ranked by {results['rows'][0]['title']}")
    table.add_column("type")
    columns = {"phrases": "phrases", **{m: m.upper() for m in metrics}, "guessing": "guessing", "upper_bound": "bound"}
    for heading in (*columns.values(), *(["mean u"] if results["probabilistic"] else [])):
        table.add_column(heading, justify="right")
    for row in results["types"]:
        cells = [f"{row['phrases']:,}", *(share(row[name]) for name in list(columns)[1:])]
        table.add_row(row["type"], *cells, *([f"{row['u']['value']:.4g}"] if results["probabilistic"] else []))
    console.print(table)
    for row in results["predictors"]:
        if row["score"] == "u" and row["r@1"]:
            found, gain = row["r@1"], row["gain"]
            print(
                f"uncertainty of phrases against R@1: Spearman {found['value']:+.3f} ± {found['se']:.3f}; "
                f"gain of refusing by it {gain['value']:+.3f} ± {gain['se']:.3f} (0 at random, 1 at best)"
            )


def share(estimate: dict) -> str:
    """{"value", "se"} in percent: "51.20 ± 0.43"."""
    return f"{100 * estimate['value']:.2f} ± {100 * estimate['se']:.2f}"


if __name__ == "__main__":
    run_command(main)
