"""The full evaluation of a model on captioned images: rankings side by side, benchmarks, and what uncertainty is worth.

    python -m finetune.measure --model runs/x --data data/flickr8k --split test
    python -m finetune.measure --model runs/x --data dataset_coco.json --images data/coco     # with COCO's benchmarks
    python -m finetune.measure --model runs/scenes --data data/scenes --split val             # embedded data

Prints one table and writes results.json and report.html. All captions of an image are its positives; the embedded data
say exactly which caption fits which image, and COCO's test split has CxC, ECCV Caption and plausible matches besides.
A run of two networks is measured by the mean of their similarities (`--second`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.measure_config import GENERATOR, MeasureConfig
from probemb.cli.command import check_numbers, parse_config, run_command, to_dict
from probemb.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.captions.find import Captioned
    from probemb.evaluation.embed_pairs import EmbeddedPairs
    from probemb.evaluation.rankings import Ranked, Ranker, RankingOptions
    from probemb.metrics import Positives

PROG = "python -m finetune.measure"
DESCRIPTION = (
    "Image-text retrieval under every ranking, the benchmarks of COCO's test split, and what uncertainty goes along "
    "with; prints a table and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")
BENCHMARKS = ("coco", "cxc", "eccv", "pmrp")
OWN, TRUE = "own captions", "all true captions"
TITLES = {"coco_5k": "COCO 5K", "coco_1k": "COCO 1K", "cxc": "CxC", "eccv": "ECCV Caption"}
METRICS = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r_precision": "R-P", "map_at_r": "mAP@R"}
WAYS = {"i2t": "image → text", "t2i": "text → image"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Everything that can be refused is refused before the model is loaded."""
    config = parse_config(MeasureConfig, PROG, DESCRIPTION, argv)
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", "images with captions")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/x --data PATH`.")
    check_numbers(config, ("batch_size", "text_batch_size", "candidates", "samples"))
    if config.erased < 0:
        raise UserError(f"--erased is {config.erased}.", "Give 0 or more.")
    from probemb.cli.device import place
    from probemb.cli.results import claim_files, results_folder, write_json
    from probemb.data.captions.find import find_captioned
    from probemb.data.image_loader import describe_bad
    from probemb.evaluation.rankings import RankingOptions, ranking_names

    rankings = ranking_names(config.rankings)
    captions = find_captioned(config.data, config.split, config.images)
    _ = captions.images  # refuses data whose images are not all there
    benchmarks = choose_benchmarks(config, captions)
    labels = None
    if "pmrp" in benchmarks:
        from probemb.data.labelled.coco_objects import read_instances

        labels = read_instances(config.instances, captions.image_ids)
    out = results_folder(config.out, config.model, "measure", "measure-results")
    claim_files(out, OUTPUTS, GENERATOR)

    from probemb.cli.progress import progress
    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.evaluation.uncertainty import projection
    from probemb.models import as_one, load_model
    from zeroshot.retrieval_report import write_report

    placement = place(config.device, config.precision)
    names = [config.model, *second_model(config)]
    loaded = [load_model(name, device=placement.device) for name in names]
    model, (_, tokenizer, transforms) = as_one([one.model for one in loaded]), loaded[0]
    if len(names) > 1:
        alone = " (--no-second: the first alone)" if config.second == "auto" else ""
        print(f"{' and '.join(names)} are measured together, by the mean of their similarities{alone}", flush=True)
    pairs = embed_pairs(
        model, tokenizer, transforms.evaluate, captions, placement=placement, batch_size=config.batch_size,
        text_batch_size=config.text_batch_size, workers=config.workers, max_bad=config.max_bad, show=progress,
    )  # fmt: skip
    if pairs.bad:
        print(describe_bad(pairs.bad), flush=True)
        benchmarks = without_lost_images(config, benchmarks)
    options = RankingOptions(
        model.scale.item(), model.shift.item(), config.samples, config.factory, config.candidates, placement.device
    )
    rows, per_query = measure(pairs, captions, rankings, options, benchmarks, labels, progress)
    findings = find(config, model, tokenizer, transforms, captions, pairs, per_query, placement)
    results = {
        "config": to_dict(config),
        "models": names,
        "device": placement.device,
        "precision": placement.precision,
        "probabilistic": getattr(model, "probabilistic", True),
        "images": len(pairs.images),
        "captions": len(pairs.texts),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in pairs.bad],
        "benchmarks": benchmarks,
        "rows": rows,
        "projection": projection(pairs),
        "uncertainty": findings,
    }
    print_table(rows, len(pairs.images), len(pairs.texts))
    told = describe_findings(findings) if findings else ["The model predicts no uncertainty."]
    print("\n".join(told))
    write_json(out / OUTPUTS[0], results, GENERATOR)
    write_report(out / OUTPUTS[1], results, pairs, captions, per_query)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)
    return 0


def second_model(config: MeasureConfig) -> list[str]:
    """--second, or by default the second network of a run, in a list; none for a run or a model that stands alone."""
    if config.second != "auto":
        return [config.second] if config.second is not None else []
    run = Path(config.model)
    return [str(run / "model-second")] if (run / "model").is_dir() and (run / "model-second").is_dir() else []


def choose_benchmarks(config: MeasureConfig, captions: Captioned) -> list[str]:
    """--benchmarks, or by default those that the data allows.

    Raises:
        UserError: an unknown name; COCO's where the ids are not COCO's; pmrp without object labels, or the reverse.
    """
    from probemb.metrics import coco_rows

    def check_ids() -> None:
        ids = captions.caption_ids
        coco_rows(captions.image_ids, None if ids is None else [number for row in ids for number in row])

    if config.benchmarks is None:
        chosen = ["pmrp"] if config.instances else []
        try:
            check_ids()
        except UserError:
            return chosen
        return ["coco", "cxc", "eccv", *chosen]
    names = list(dict.fromkeys(name.strip() for name in config.benchmarks.split(",") if name.strip()))
    for name in names:
        if name not in BENCHMARKS:
            what = f"There is no benchmark '{name}'.{nearest(name, BENCHMARKS)}"
            raise UserError(what, f"Choose from {', '.join(BENCHMARKS)}, separated by commas.")
    if set(names) - {"pmrp"}:
        check_ids()
    if "pmrp" in names and not config.instances:
        raise UserError(
            "Plausible matches need to know which objects the images show.",
            "Name COCO's instances_val2014.json with --instances.",
        )
    if config.instances and "pmrp" not in names:
        raise UserError("--instances is given, but pmrp is not among --benchmarks.", "Add pmrp, or leave it out.")
    return names


def without_lost_images(config: MeasureConfig, benchmarks: list[str]) -> list[str]:
    """Benchmarks of the whole test split are gone if one of its images is. Raises UserError if they were asked for."""
    lost = [name for name in benchmarks if name != "pmrp"]
    if lost and config.benchmarks is not None:
        raise UserError(f"Images are left out, so {', '.join(lost)} cannot be measured.", "Fetch those images again.")
    return [name for name in benchmarks if name not in lost]


def measure(
    pairs: EmbeddedPairs, captions: Captioned, rankings: Sequence[str], options: RankingOptions,
    benchmarks: Sequence[str] = (), labels: Tensor | None = None, show=None,
) -> tuple[list[dict], dict[str, dict[str, Tensor]]]:  # fmt: skip
    """Every ranking against every kind of positives.

    Returns:
        rows: {"positives", "ranking", "how", "i2t", "t2i", "rsum", "ms_per_query", "index_seconds"}.
        per_query: side ("images", "captions") -> metric -> values of every query under the first ranking.
    """
    from probemb.cli.progress import silent
    from probemb.evaluation.embed_pairs import exact_match
    from probemb.evaluation.rankings import (
        both_directions,
        depth_for,
        describe_ranking,
        make_ranker,
        own_captions,
        rank_all,
    )
    from probemb.metrics import Positives, coco_depth, query_metrics

    n_images, n_captions = len(pairs.images), len(pairs.texts)
    kinds: dict[str, Positives] = {OWN: own_captions(pairs.owner, n_images)}
    if captions.scenes is not None:
        kinds[TRUE] = Positives.from_matrix(exact_match(captions, pairs.kept))
    depth = depth_for(list(kinds.values()))
    coco = [benchmark for benchmark in benchmarks if benchmark != "pmrp"]
    if coco:
        depth = (max(depth[0], coco_depth()[0]), max(depth[1], coco_depth()[1]))
    rows: list[dict] = []
    per_query: dict[str, dict[str, Tensor]] = {"images": {}, "captions": {}}
    with (show or silent)("rankings", len(rankings)) as advance:
        for place, name in enumerate(rankings):
            ranker = make_ranker(name, pairs.images, pairs.texts, options)
            ranked = rank_all(ranker, n_images, n_captions, depth)
            about = {
                "ranking": name, "how": describe_ranking(name, options), "ms_per_query": ranked.ms_per_query,
                "index_seconds": ranked.build_seconds,
            }  # fmt: skip
            for positives, matches in kinds.items():
                rows.append({"positives": positives, **about, **both_directions(ranked, matches)})
                if place == 0:
                    _keep(per_query, positives, query_metrics(ranked.i2t, matches), "images")
                    _keep(per_query, positives, query_metrics(ranked.t2i, matches.transposed()), "captions")
            if coco:
                rows += _coco_rows(ranker, ranked, pairs, captions, coco, about, per_query if place == 0 else None)
            if labels is not None and not name.startswith("faiss"):
                rows += _plausible_rows(ranker, pairs, labels, about, per_query if place == 0 else None)
            if advance:
                advance(1)
    order = list(dict.fromkeys(row["positives"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["positives"])), per_query


def _keep(per_query: dict, positives: str, values: dict[str, Tensor], side: str) -> None:
    per_query[side] |= {f"{positives}: {METRICS[name]}": tensor for name, tensor in values.items()}


def _coco_rows(
    ranker: Ranker, ranked: Ranked, pairs: EmbeddedPairs, captions: Captioned, benchmarks: list[str], about: dict,
    per_query: dict | None,
) -> list[dict]:  # fmt: skip
    import torch

    from probemb.metrics import coco_benchmarks, coco_query_metrics, coco_rows

    ids = [captions.image_ids[i] for i in pairs.kept], [n for i in pairs.kept for n in captions.caption_ids[i]]
    lists = []

    def rank(images: Tensor, texts: Tensor, depth: tuple[int, int]):
        known = len(images) == len(ranked.i2t) and len(texts) == len(ranked.t2i)
        known = known and all(torch.equal(rows, torch.arange(len(rows))) for rows in (images, texts))
        if known:  # the data is the test split as it is: ranked already
            lists.append((ranked.i2t[:, : depth[0]], ranked.t2i[:, : depth[1]]))
        else:
            lists.append(ranker(images, texts, depth))
        return lists[-1]

    found = coco_benchmarks(rank, *ids, benchmarks)
    if per_query is not None:
        image_rows, caption_rows = coco_rows(*ids)
        places = {"i2t": ("images", image_rows, len(ids[0])), "t2i": ("captions", caption_rows, len(ids[1]))}
        for name, ways in coco_query_metrics(lists[0], benchmarks).items():
            for way, metrics in ways.items():
                side, rows, total = places[way]
                spread = {
                    metric: torch.full((total,), torch.nan, dtype=torch.float64).index_copy(0, rows, values)
                    for metric, values in metrics.items()
                }
                _keep(per_query, TITLES[name], spread, side)
    return [{"positives": TITLES[name], **about, **scores} for name, scores in found.items()]


def _plausible_rows(
    ranker: Ranker, pairs: EmbeddedPairs, labels: Tensor, about: dict, per_query: dict | None
) -> list[dict]:
    from probemb.evaluation.scores import both_ways
    from probemb.metrics import plausible_match_r_precision
    from probemb.metrics.plausible import VARIANTS

    images = labels[pairs.kept]
    texts = images[pairs.owner]
    of_images, of_texts = both_ways(ranker.scores)
    rows = []
    for variant in VARIANTS:
        found = {
            "i2t": plausible_match_r_precision(of_images, images, texts, variant=variant),
            "t2i": plausible_match_r_precision(of_texts, texts, images, variant=variant),
        }
        title = f"plausible matches, {variant}"
        row = {"positives": title, **about}
        for way, side in (("i2t", "images"), ("t2i", "captions")):
            values = found[way].pop("per_query")
            if per_query is not None:
                _keep(per_query, title, {"r_precision": values["pmrp"], "r@1": values["pmr1"]}, side)
            row[way] = {"r@1": found[way]["pmr1"], "r_precision": found[way]["pmrp"], **found[way]}
        rows.append(row)
    return rows


def find(config: MeasureConfig, model, tokenizer, transforms, captions, pairs, per_query, placement) -> dict:
    """What uncertainty goes along with: everything under "uncertainty" in results.json; {} if the model has none."""
    from probemb.evaluation.embed_pairs import true_ambiguity
    from probemb.evaluation.uncertainty import erasing, extremes, quality, spearman

    if not getattr(model, "probabilistic", True):
        return {}
    found: dict = {"quality": quality(pairs, per_query)}
    if captions.scenes is not None:
        ambiguity = true_ambiguity(captions, pairs.kept)
        found["ambiguity_spearman"] = spearman(pairs.texts.uncertainty(), ambiguity)
    if config.erased:
        found["erased"] = erasing(
            model, tokenizer, transforms.evaluate, captions, pairs.kept, config.erased, placement=placement,
            batch_size=config.batch_size,
        )  # fmt: skip
    found["extremes"] = {"images": extremes(pairs.images), "captions": extremes(pairs.texts)}
    return found


# ------------------------------------------------------------------------------------------------------- output


def describe_findings(findings: dict) -> list[str]:
    """The main correlations as lines of text."""

    def text(value: float | None) -> str:
        return "undefined" if value is None else f"{value:+.3f}"

    lines = []
    for side, metrics in findings["quality"].items():
        both = metrics[f"{OWN}: {METRICS['r@1']}"]
        if both["bins"]:
            bins, curve = both["bins"], both["rejection"]
            lines.append(
                f"uncertainty of {side} against R@1: Pearson {text(bins['pearson'])} over {len(bins['counts'])} bins, "
                f"Spearman {text(bins['spearman'])} over single items; area under the rejection curve "
                f"{curve['area']:.3f} (at random {curve['random']:.3f}, at best {curve['oracle']:.3f})"
            )
    if "ambiguity_spearman" in findings:
        lines.append(
            f"uncertainty of captions against their true ambiguity: Spearman {text(findings['ambiguity_spearman'])}"
        )
    for what, values in findings.get("erased", {}).items():
        lines.append(f"uncertainty against the share of erased {what}: Spearman {text(values['spearman'])}")
    return lines


def print_table(rows: Sequence[dict], n_images: int, n_captions: int) -> None:
    """One line for each ranking, direction and kind of positives; percent."""
    from rich.console import Console
    from rich.table import Table

    from probemb.evaluation.rankings import TITLES as RANKINGS

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    table = Table(title=f"retrieval, {n_images:,} images and {n_captions:,} captions, percent")
    for heading in ("positives", "ranked by", "direction"):
        table.add_column(heading)
    for heading in (*METRICS.values(), "RSUM", "ms/query"):
        table.add_column(heading, justify="right")
    for i, row in enumerate(rows):
        for way, title in WAYS.items():
            cells = [f"{100 * row[way][m]:.2f}" if m in row[way] else "" for m in METRICS]
            last = way == "t2i"
            total = f"{row['rsum']:.1f}" if last and "rsum" in row else ""
            cost = f"{row['ms_per_query']:.3g}" if last and row["positives"] == OWN else ""
            end = last and (i + 1 == len(rows) or rows[i + 1]["positives"] != row["positives"])
            table.add_row(row["positives"], RANKINGS[row["ranking"]], title, *cells, total, cost, end_section=end)
    console.print(table)


if __name__ == "__main__":
    run_command(main)
