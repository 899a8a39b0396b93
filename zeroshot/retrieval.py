"""Image-text retrieval in both directions, ranked by CSD and by the means alone.

    python -m zeroshot.retrieval --model runs/x --data data/flickr8k/val-00000.tar
    python -m zeroshot.retrieval --model runs/scenes --data data/scenes/val          # embedded data

All captions of an image are its positives. The embedded data say exactly which caption fits which image; there the
table has a second half with all true positives. Source: PCME++ §4.1 (metrics), §C.5 (ranking).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemb.cli.command import check_numbers, parse_config, run_command, to_dict
from probemb.errors import UserError
from zeroshot.config import GENERATOR, RetrievalConfig

if TYPE_CHECKING:
    import torch

    from probemb.data.captions.find import Captioned
    from probemb.gaussian import Gaussian

PROG = "python -m zeroshot.retrieval"
DESCRIPTION = "Image-text retrieval on webdataset shards with captions; prints a table and writes retrieval.json."
OUTPUT = "retrieval.json"
MAX_PAIRS = 2_000_000_000  # scores held at once, 4 bytes each


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    from probemb.cli.device import place
    from probemb.cli.progress import progress
    from probemb.cli.results import claim_files, results_folder, write_json
    from probemb.data.captions.find import find_captioned
    from probemb.data.image_loader import describe_bad

    config = parse_config(RetrievalConfig, PROG, DESCRIPTION, argv)
    for option, what in (("model", "a run folder, a model folder or a hub name"), ("data", "shards with captions")):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{PROG} --model runs/x --data PATH`.")
    check_numbers(config)
    captions = find_captioned(config.data, format="webdataset")
    refuse_too_many_pairs(len(captions), captions.n_captions)
    out = results_folder(config.out, config.model, "retrieval", "zeroshot-results/retrieval")
    claim_files(out, [OUTPUT], GENERATOR)

    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.models import load_model

    placement = place(config.device, config.precision)
    model, tokenizer, transforms = load_model(config.model, device=placement.device)
    images, texts, owner, kept, bad = embed_pairs(
        model, tokenizer, transforms.evaluate, captions, placement=placement, batch_size=config.batch_size,
        text_batch_size=config.text_batch_size, workers=config.workers, max_bad=config.max_bad, show=progress,
    )  # fmt: skip
    if bad:
        print(describe_bad(bad), flush=True)
    results = score(images.to(placement.device), texts.to(placement.device), owner)
    if captions.scenes is not None:
        results += score_exact(images, texts, captions, kept, placement.device)
    print_table(results, len(images), len(texts))
    findings = uncertainty_findings(images, texts, owner, captions, kept)
    for line in describe_findings(findings):
        print(line)
    content = {
        "config": to_dict(config),
        "images": len(images),
        "captions": len(texts),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in bad],
        "rows": results,
        "uncertainty": findings,
    }
    write_json(out / OUTPUT, content, GENERATOR)
    print(f"\nwritten: {out / OUTPUT}", flush=True)
    return 0


def refuse_too_many_pairs(n_images: int, n_texts: int) -> None:
    """All scores are held at once. Raises UserError."""
    if n_images * n_texts > MAX_PAIRS:
        raise UserError(
            f"{n_images:,} images and {n_texts:,} captions are {n_images * n_texts:,} pairs, more than fit into memory "
            "at once.",
            "Evaluate fewer shards.",
        )


def score(images: Gaussian, texts: Gaussian, owner: torch.Tensor, match=None, positives: str = "own captions") -> list:
    """Recall, R-Precision, mAP@R and RSUM in both directions, by CSD and by the means alone.

    Args:
        images: (N, D); texts: (M, D); owner: (M,) row of each caption's image.
        match: (N, M) bool, which captions fit which images; by default only an image's own.
    """
    import torch

    from probemb.distances import csd
    from probemb.metrics import retrieval_metrics, rsum

    if match is None:
        match = owner.to(images.mean.device) == torch.arange(len(images), device=images.mean.device)[:, None]
    rows = []
    for ranking, scores in (("csd", lambda: -csd(images, texts)), ("mean", lambda: images.mean @ texts.mean.T)):
        similarity = scores()
        i2t, t2i = retrieval_metrics(similarity, match), retrieval_metrics(similarity.T, match.T)
        rows.append({"positives": positives, "ranking": ranking, "i2t": i2t, "t2i": t2i, "rsum": rsum(i2t, t2i)})
    return rows


def score_exact(images: Gaussian, texts: Gaussian, captions: Captioned, kept: Sequence[int], device: str) -> list:
    """`score` with every true pair of the embedded world as a positive."""
    from probemb.evaluation.embed_pairs import exact_match

    match = exact_match(captions, kept).to(device)
    return score(images.to(device), texts.to(device), None, match, "all true captions")


def uncertainty_findings(images: Gaussian, texts: Gaussian, owner, captions: Captioned, kept: Sequence[int]) -> dict:
    """What uncertainty goes along with: R@1 in ten bins, and in the embedded world the true ambiguity of captions."""
    from dataclasses import asdict

    import torch

    from probemb.distances import csd
    from probemb.metrics import average_ranks, pearson, ranked_matches, uncertainty_bins

    match = owner == torch.arange(len(images))[:, None]
    scores = -csd(images, texts)
    found: dict = {}
    for name, gaussian, s, m in (("images", images, scores, match), ("captions", texts, scores.T, match.T)):
        bins = uncertainty_bins(gaussian.uncertainty(), ranked_matches(s, m, 1)[:, 0].double())
        found[name] = asdict(bins) if bins else None
    if captions.scenes is not None:
        from probemb.evaluation.embed_pairs import true_ambiguity

        truth = true_ambiguity(captions, kept)
        found["ambiguity_spearman"] = pearson(average_ranks(texts.uncertainty()), average_ranks(truth))
    return found


def describe_findings(findings: dict) -> list[str]:
    """The correlations as lines of text."""

    def text(value: float | None) -> str:
        return "undefined" if value is None else f"{value:+.3f}"

    lines = [
        f"uncertainty of {name} against R@1: Pearson {text(bins['pearson'])} over {len(bins['counts'])} bins, "
        f"Spearman {text(bins['spearman'])} over single items"
        for name in ("images", "captions")
        if (bins := findings[name])
    ]
    if "ambiguity_spearman" in findings:
        lines.append(
            f"uncertainty of captions against their true ambiguity: Spearman {text(findings['ambiguity_spearman'])}"
        )
    return lines


def print_table(rows: Sequence[dict], n_images: int, n_texts: int) -> None:
    """One line for each direction, ranking and kind of positives; percent."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=f"retrieval, {n_images:,} images and {n_texts:,} captions, percent")
    for heading in ("positives", "direction", "ranked by"):
        table.add_column(heading)
    for heading in ("R@1", "R@5", "R@10", "R-P", "mAP@R", "RSUM"):
        table.add_column(heading, justify="right")
    names = {"i2t": "image → text", "t2i": "text → image"}
    for index, row in enumerate(rows):
        for key, name in names.items():
            metrics = row[key]
            cells = [f"{100 * metrics[m]:.2f}" for m in ("r@1", "r@5", "r@10", "r_precision", "map_at_r")]
            total = f"{row['rsum']:.1f}" if key == "t2i" else ""
            last = key == "t2i" and (index + 1 == len(rows) or rows[index + 1]["positives"] != row["positives"])
            table.add_row(row["positives"], name, row["ranking"], *cells, total, end_section=last)
    console.print(table)


if __name__ == "__main__":
    run_command(main)
