"""The weights of the ranking `tolerance`: given, chosen on other data or on the evaluated data (an oracle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError
from zeroshot.config import RetrievalConfig

if TYPE_CHECKING:
    from probemb.data.captions.find import CaptionDataset
    from probemb.evaluation.embed_pairs import EmbeddedPairs
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.tolerance import Tolerance

NAME = "tolerance"


def check_tolerance(config: RetrievalConfig, rankings: Sequence[str]) -> None:
    """Refuse options that exclude each other or have no effect. Raises UserError."""
    weights = config.tolerance
    given = [name for name in ("i2t", "t2i") if getattr(weights, name) is not None]
    if len(given) == 1:
        other = "t2i" if given == ["i2t"] else "i2t"
        raise UserError(
            f"--tolerance.{given[0]} is given without --tolerance.{other}.", "Give both, or none to choose them."
        )
    if given and config.select_data is not None:
        raise UserError("--select-data is given, but the weights of tolerance are too.", "Leave one of them out.")
    if given and config.select_metric != "auto":
        raise UserError("--select-metric has no effect on weights that are given.", "Leave it out.")
    if config.select_data is None and config.select_split != "val":
        raise UserError("--select-split has no effect without --select-data.", "Leave it out, or name the data.")
    if NAME not in rankings and (given or config.select_data is not None or config.select_metric != "auto"):
        raise UserError(
            f"The weights of tolerance are not used: the rankings are {', '.join(rankings)}.",
            "Leave its options out, or add it to --rankings if the model predicts variances.",
        )


def find_selection(config: RetrievalConfig, evaluated: CaptionDataset) -> CaptionDataset | None:
    """The data of --select-data without pictures that are evaluated too, or None. Raises UserError: too many are."""
    if config.select_data is None:
        return None
    from probemb.cli.device import loader_workers
    from probemb.cli.progress import progress
    from probemb.data.captions.find import find_captions
    from probemb.data.image_loader import in_both
    from probemb.data.look_alikes import leave_out
    from probemb.evaluation.benchmarks import refuse_too_many_exact_pairs

    images = config.images if Path(config.select_data) == Path(config.data) else None
    found = find_captions(config.select_data, config.select_split, images, exif=config.exif)
    if known := in_both(found.images, evaluated.images):
        raise UserError(
            f"{len(known):,} of the images in {found.images.source} are also evaluated (such as {known[0]}).",
            "Choose the weights of tolerance on other images, such as --select-split val.",
        )
    workers = loader_workers(config.workers, len(found) + len(evaluated), "cpu")
    rows, notice = leave_out(found.images, evaluated.images, workers, progress)
    if notice:
        print(notice, flush=True)
        found = found.only(rows)
    refuse_too_many_exact_pairs(found)
    check_metric(config, found)
    return found


def check_metric(config: RetrievalConfig, captions: CaptionDataset) -> None:
    """Refuse a metric that the data to choose on does not allow. Raises UserError."""
    if config.select_metric == "map-at-r-true" and captions.scenes is None:
        raise UserError(
            "--select-metric map-at-r-true needs data whose true captions are all known.",
            "Use map-at-r or recall, or the scenes of `python -m tools.make_scenes`.",
        )


def choose(
    config: RetrievalConfig, embedder: Embedder, captions: CaptionDataset, pairs: EmbeddedPairs,
    selection: CaptionDataset | None,
) -> Tolerance:  # fmt: skip
    """The given weights, or the best ones on the selection, or without one on the evaluated pairs (an oracle).

    Raises UserError: too many images of the selection that cannot be read, embeddings that are not finite.
    """
    from probemb.evaluation.benchmarks import OWN, TRUE, known_positives
    from probemb.evaluation.embed_pairs import embed_pairs
    from probemb.evaluation.tolerance import ORACLE, Tolerance, choose_tolerance

    if config.tolerance.i2t is not None:
        return Tolerance(config.tolerance.i2t, config.tolerance.t2i)
    chosen = ORACLE
    if selection is not None:
        captions, pairs = selection, embed_pairs(embedder, selection)
        chosen = f"chosen on {selection.split or Path(config.select_data).name}"
    positives, device = known_positives(pairs, captions), embedder.device.name
    true = config.select_metric in ("auto", "map-at-r-true") and TRUE in positives
    metric = "map_at_r" if true or config.select_metric == "map-at-r" else "recall"
    there = pairs._replace(images=pairs.images.to(device), texts=pairs.texts.to(device))
    return choose_tolerance(there, positives[TRUE if true else OWN], metric, chosen=chosen, of=TRUE if true else OWN)


def results_of(tolerance: Tolerance | None) -> dict:
    """For results.json: under "given", "oracle" or "chosen" the weights, and the curve that they were chosen from."""
    if tolerance is None:
        return {}
    return {tolerance.chosen.split()[0]: asdict(tolerance)}


def describe_tolerance(found: dict) -> list[str]:
    """Lines of text about `results_of`."""
    from probemb.evaluation.tolerance import METRICS

    return [
        f"tolerance, {one['chosen']}: u of captions times {one['i2t']:g}, of images times {one['t2i']:g}, the best by "
        f"{METRICS[one['metric']]} of {one['positives']}"
        for one in found.values()
        if one["curve"]
    ]
