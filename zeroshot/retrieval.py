"""Image-text retrieval: every ranking against every kind of positives, and the value of uncertainty.

    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test
    python -m zeroshot.retrieval --model runs/x --data dataset_coco.json --images data/coco     # with COCO's benchmarks
    python -m zeroshot.retrieval --model runs/scenes --data data/scenes --split val             # synthetic data
    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test --judgements judgements.tsv.gz
    python -m zeroshot.retrieval --model runs/x --data data/flickr8k --split test --select-data data/flickr8k

Prints one table and writes results.json and report.html. All captions of an image are its positives; the synthetic
data have exact positives, and COCO's test split has CxC, ECCV Caption and plausible matches.
A run with two networks is evaluated by the mean of their similarities (`--second`). Source: PCME++ §4.1, §C.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.config import RETRIEVAL_GENERATOR, RetrievalConfig
from zeroshot.tolerance import (
    NAME,
    check_metric,
    check_tolerance,
    choose,
    describe_tolerance,
    find_selection,
    results_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.find import CaptionDataset
    from zeroshot.judgements import Judged

PROG = "python -m zeroshot.retrieval"
DESCRIPTION = (
    "Image-text retrieval under every ranking, the benchmarks of COCO's test split, and the value of uncertainty; "
    "prints a table and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")
UNKNOWN = 20  # unknown words that are named
DIRECTIONS = {"i2t": "image → text", "t2i": "text → image"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    config = parse_config(RetrievalConfig, PROG, DESCRIPTION, argv)
    check(config)
    from probemb.cli.results import claim_files, results_folder
    from probemb.data.captions.find import find_captions
    from probemb.evaluation.benchmarks import choose_benchmarks, refuse_too_many_exact_pairs
    from probemb.evaluation.rankings import check_factory, ranking_names
    from probemb.search import refuse_small_gallery
    from zeroshot.judgements import SCORES, read_judged

    rankings = ranking_names(config.rankings)
    check_factory(config.factory, rankings)
    check_tolerance(config, rankings)
    captions = find_captions(config.data, config.split, config.images, exif=config.exif)
    _ = captions.images  # refuses data with missing images
    if any(name.startswith("faiss") for name in rankings):
        refuse_small_gallery(config.factory, min(len(captions), captions.n_captions))
    refuse_too_many_exact_pairs(captions)
    selection = find_selection(config, captions)
    check_metric(config, selection or captions)
    benchmarks = choose_benchmarks(config.benchmarks, captions, config.instances is not None)
    objects = None
    if "pmrp" in benchmarks:
        from probemb.data.labelled.coco_objects import read_objects

        objects = read_objects(config.instances, captions.image_ids)
    judged = read_judged(config, captions)
    out = results_folder(config.out, config.model, "retrieval", "zeroshot-results/retrieval")
    claim_files(out, (*OUTPUTS, SCORES), RETRIEVAL_GENERATOR)
    evaluate(config, captions, selection, rankings, benchmarks, objects, judged, out)
    return 0


def check(config: RetrievalConfig) -> None:
    """Refuse options that are missing or out of range."""
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", "images with captions")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/x --data PATH`.")


def evaluate(
    config: RetrievalConfig, captions: CaptionDataset, selection: CaptionDataset | None, rankings: list[str],
    benchmarks: list[str], objects: Tensor | None, judged: Judged | None, out: Path,
) -> None:  # fmt: skip
    """Load the model, embed, rank, and write the results into `out`."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.evaluation.analyses.containment import generality
    from probemb.evaluation.benchmarks import evaluate_rankings
    from probemb.evaluation.embed_pairs import centres, embed_pairs
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.predictors import evaluate_predictors
    from probemb.evaluation.rankings import RankingOptions, fitting
    from probemb.evaluation.tolerance import CSD
    from probemb.evaluation.uncertainty import findings, projection
    from probemb.models import as_one, load_model
    from probemb.models.match import MatchModel
    from zeroshot.judgements import evaluate_judgements, shares_of_yes
    from zeroshot.reports.retrieval import SHOWN, write_report

    device = choose_device(config.device, config.precision)
    names = [config.model, *second_model(config)]
    loaded = [load_model(name, device.name, config.resize) for name in names]
    model = as_one([one.model for one in loaded])
    rankings = fitting(rankings, model, config.rankings is not None)
    check_tolerance(config, rankings)  # a model without variances does not rank by it
    if len(names) > 1:
        alone = " (--no-second: the first alone)" if config.second == "auto" else ""
        print(f"{' and '.join(names)} are evaluated together, by the mean of their similarities{alone}", flush=True)
    embedder = Embedder(
        model, loaded[0].tokenizer, loaded[0].transforms.evaluate, device, config.batch_size, config.text_batch_size,
        config.workers, config.max_bad, progress,
    )  # fmt: skip
    pairs = embed_pairs(embedder, captions, with_tokens="attention" in rankings)
    if pairs.bad:
        print(describe_bad(pairs.bad), flush=True)
        benchmarks = without_lost_images(config, benchmarks)
    tolerance = choose(config, embedder, captions, pairs, selection) if NAME in rankings else None
    options = RankingOptions(
        *model.match_numbers(), config.samples, config.factory, config.candidates, device.name,
        tolerance or CSD, model.attention, pairs.tokens,
    )  # fmt: skip
    rows, per_query, tops = evaluate_rankings(pairs, captions, rankings, options, benchmarks, objects, progress)
    probabilistic = getattr(model, "probabilistic", True)
    one, asked = centres(pairs), config.uncertainty
    found = findings(embedder, captions, one, per_query, tops, config.erased, asked) if probabilistic else {}
    correct = {side: values[SHOWN] for side, values in per_query.items()}
    results = {
        "config": to_dict(config) | {"split": captions.split},
        "models": names,
        "device": device.name,
        "precision": device.precision,
        "probabilistic": probabilistic,
        "images": len(pairs.images),
        "captions": len(pairs.texts),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in pairs.bad],
        "unknown_words": unknown_captions(loaded[0].tokenizer, captions),
        "benchmarks": benchmarks,
        "rows": rows,
        "tolerance": results_of(tolerance),
        "projection": projection(one),
        "uncertainty": found,
        "generality": generality(one, captions) if probabilistic else None,
        "judgements": evaluate_judgements(judged, pairs, captions, rankings, options, model, names, out),
        "predictors": evaluate_predictors(
            one, captions, correct, MatchModel.of(model), device.name, shares_of_yes(judged, pairs, captions)
        ),
    }
    print_results(results)
    write_json(out / OUTPUTS[0], results, RETRIEVAL_GENERATOR)
    write_report(out / OUTPUTS[1], results, pairs, captions, per_query)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def second_model(config: RetrievalConfig) -> list[str]:
    """--second, or by default the second network of a run, in a list; empty for a run with one network."""
    if config.second != "auto":
        return [config.second] if config.second is not None else []
    from probemb.models import networks_of

    return networks_of(config.model)[1:]


def unknown_captions(tokenizer, captions: CaptionDataset) -> dict | None:
    """Captions with words that the model does not know; None without any."""
    from probemb.models.inputs import unknown_words

    texts = captions.flat()
    hit = sum(bool(unknown_words(tokenizer, [text])) for text in texts)
    return (
        {"captions": hit, "share": hit / len(texts), "words": unknown_words(tokenizer, texts)[:UNKNOWN]}
        if hit
        else None
    )


def without_lost_images(config: RetrievalConfig, benchmarks: list[str]) -> list[str]:
    """The benchmarks that work with missing images. Raises UserError if others were named."""
    lost = [name for name in benchmarks if name != "pmrp"]
    if lost and config.benchmarks is not None:
        raise UserError(f"Images are left out, so {', '.join(lost)} cannot be measured.", "Fetch those images again.")
    return [name for name in benchmarks if name not in lost]


# ------------------------------------------------------------------------------------------------------- output


def print_results(results: dict) -> None:
    """Tables and lines on stdout."""
    from zeroshot.reports.judgements import print_judgements
    from zeroshot.reports.predictors import print_predictors
    from zeroshot.reports.retrieval import describe_generality, describe_unknown

    found = results["uncertainty"]
    print_table(results["rows"], results["images"], results["captions"])
    print("\n".join(describe_tolerance(results["tolerance"])), end="\n" if results["tolerance"] else "")
    print("\n".join(describe_findings(found) if found else ["The model predicts no uncertainty."]))
    if results["unknown_words"]:
        print(describe_unknown(results["unknown_words"]))
    if results["generality"]:
        print("\n".join(describe_generality(results["generality"])))
    if results["judgements"]:
        print_judgements(results["judgements"])
    print_predictors(results["predictors"])


def describe_findings(found: dict) -> list[str]:
    """The main correlations as lines of text."""
    from zeroshot.reports.retrieval import BINNED, SHOWN

    def text(value: float | None) -> str:
        return "undefined" if value is None else f"{value:+.3f}"

    lines = []
    for side, metrics in found["quality"].items():
        for name in (name for name in BINNED if name in metrics and metrics[name]["bins"]):
            bins, curve = metrics[name]["bins"], metrics[name]["rejection"]
            what = "R@1" if name == SHOWN else f"R@1 of {name.partition(':')[0]}"
            lines.append(
                f"uncertainty of {side} against {what}: Pearson {text(bins['pearson'])} over {len(bins['counts'])} "
                f"bins, Spearman {text(bins['spearman'])} over single items; area under the rejection curve "
                f"{curve['area']:.3f} (at random {curve['random']:.3f}, at best {curve['oracle']:.3f})"
            )
    if "ambiguity_spearman" in found:
        lines.append(
            f"uncertainty of captions against their true ambiguity: Spearman {text(found['ambiguity_spearman'])}"
        )
    lines.append(f"uncertainty of captions against their number of words: Spearman {text(found['length_spearman'])}")
    for what, values in found.get("erased", {}).items():
        lines.append(f"uncertainty against the share of erased {what}: Spearman {text(values['spearman'])}")
    if shares := [x for x in found.get("erased", {}).get("ends", {}).get("lies_in", []) if x is not None]:
        lines.append(f"captions that lie in their prefix (inclusion): {100 * sum(shares) / len(shares):.1f} %")
    return lines


def print_table(rows: Sequence[dict], n_images: int, n_captions: int) -> None:
    """One line for each ranking, direction and kind of positives; percent."""
    from rich.console import Console
    from rich.table import Table

    from probemb.evaluation.benchmarks import METRICS, OWN
    from probemb.evaluation.rankings import title_of

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    table = Table(title=f"retrieval, {n_images:,} images and {n_captions:,} captions, percent")
    for heading in ("positives", "ranked by", "direction"):
        table.add_column(heading)
    for heading in (*METRICS.values(), "RSUM", "ms/query", "numbers"):
        table.add_column(heading, justify="right")
    for i, row in enumerate(rows):
        for direction, title in DIRECTIONS.items():
            cells = [f"{100 * row[direction][m]:.2f}" if m in row[direction] else "" for m in METRICS]
            last = direction == "t2i"
            total = f"{row['rsum']:.1f}" if last and "rsum" in row else ""
            cost = f"{row['ms_per_query']:.3g}" if last and row["positives"] == OWN else ""
            kept = f"{row['numbers_per_item']:,}" if cost else ""
            end = last and (i + 1 == len(rows) or rows[i + 1]["positives"] != row["positives"])
            table.add_row(row["positives"], title_of(row), title, *cells, total, cost, kept, end_section=end)
    console.print(table)


if __name__ == "__main__":
    run_command(main)
