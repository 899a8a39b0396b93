"""Start and end of every evaluation: claim the folder, load the model, show and write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probemb.cli.configuration import to_dict
from probemb.cli.device import choose_device, loader_workers
from probemb.cli.progress import progress
from probemb.cli.results import claim_files, results_folder, write_json
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.image_loader import Images, describe_bad, in_both
from probemb.data.look_alikes import leave_out
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import RankingOptions, ranking_names
from probemb.models import as_one, check_images, load_model
from probemb.models.inputs import unknown_words
from probemb.reports.pages import Block, Page, print_blocks, write_page
from probemb.reports.text import printable
from zeroshot.command import CaptionConfig, EvaluationConfig

UNKNOWN = 20  # unknown words that are named
OUTPUTS = ("results.json", "report.html")
ABOUT_U = (
    "u measures ambiguity within the training domain: how many things an input could match. It does not tell whether "
    "the model knows an input, nor is it always the best predictor of a wrong answer."
)


def claim(config: EvaluationConfig, name: str) -> Path:
    """The folder of the results: --out, or `name` in the run folder. Raises UserError: it holds other files."""
    elsewhere = "zeroshot-results" if name == "zeroshot" else f"zeroshot-results/{name}"
    out = results_folder(config.out, config.model, name, elsewhere)
    claim_files(out, OUTPUTS, f"probemb {name}")
    return out


def open_captions(config: CaptionConfig) -> CaptionDataset:
    """The images with captions of --data. Raises UserError: images are missing."""
    captions = find_captions(config.data, config.split, config.images, exif=config.exif)
    _ = captions.images  # refuses data with missing images
    return captions


def open_model(config: EvaluationConfig, names: Sequence[str] = ()) -> Embedder:
    """The model of --model, or those of several names as one, ready to embed. Raises UserError."""
    device = choose_device(config.device, config.precision)
    loaded = [load_model(name, device.name, config.resize) for name in names or [config.model]]
    return Embedder(
        as_one([one.model for one in loaded]), loaded[0].tokenizer, loaded[0].transforms.evaluate, device,
        config.batch_size, config.text_batch_size, config.workers, config.max_bad, progress,
    )  # fmt: skip


def open_analysis(config: CaptionConfig, name: str) -> tuple[Embedder, CaptionDataset, Path]:
    """Model, data and folder of an analysis of single Gaussians. Raises UserError: the model has no such."""
    captions = open_captions(config)
    out = claim(config, name)
    embedder = open_model(config)
    model, device = embedder.model, embedder.device
    print(
        f"{config.model} on {captions.source}, {len(captions):,} images, on {device.name} in {device.precision}",
        flush=True,
    )
    if not model.probabilistic or model.n_embeddings > 1:
        has = "several embeddings of an item" if model.n_embeddings > 1 else "no variances"
        raise UserError(f"{config.model} is a model with {has}.", "Name one with a mean and a variance of every item.")
    check_images(model, captions.images)
    return embedder, captions, out


def unseen_rows(found: Images, evaluated: Images, workers: int | None, remedy: str) -> tuple[list[int], list[str]]:
    """The rows of images to choose on that show no evaluated picture, and a notice if some do.

    Raises UserError: files that are both evaluated and chosen on, or too few others.
    """
    if known := in_both(found, evaluated):
        what = f"{len(known):,} of the images in {found.source} are also evaluated (such as {known[0]})."
        raise UserError(what, remedy)
    rows, notice = leave_out(found, evaluated, loader_workers(workers, len(found) + len(evaluated), "cpu"), progress)
    return rows, [notice] if notice else []


def pair_rankings(text: str | None) -> list[str]:
    """--rankings of a command that scores single pairs; an empty list by default. Raises UserError."""
    names = [] if text is None else ranking_names(text)
    if wrong := [name for name in names if name.startswith("faiss") or name == "tolerance"]:
        raise UserError(f"The ranking {wrong[0]} scores no single pairs.", "Choose csd, mean, match-probability, ...")
    return names


def pair_options(embedder: Embedder, samples: int) -> RankingOptions:
    """Options of the rankings of single pairs."""
    model = embedder.model
    return RankingOptions(*model.match_numbers(), samples, device=embedder.device.name, attention=model.attention)


def settings(config: EvaluationConfig, embedder: Embedder, split: str | None = None) -> dict:
    """The first keys of results.json: the options, and where the model ran."""
    resolved = to_dict(config) | ({"split": split} if hasattr(config, "split") else {})
    return {"config": resolved, "device": embedder.device.name, "precision": embedder.device.precision}


def unknown_notice(tokenizer, texts: Sequence[str], what: str) -> list[str]:
    """A warning in a list if the model does not know some words of the texts."""
    words = unknown_words(tokenizer, texts)
    if not words:
        return []
    some = printable(", ".join(words[:UNKNOWN]))
    return [f"{len(words):,} words of the {what} are unknown to the model, which reads them all alike: {some}"]


def left_out(bad: Sequence[tuple[str, str]]) -> list[dict]:
    """Images that could not be read, for results.json; says so on the console too."""
    if bad:
        print(describe_bad(bad), flush=True)
    return [{"name": name, "reason": reason} for name, reason in bad]


def finish(out: Path, name: str, results: dict, page: Page, shown: Sequence[Block]) -> None:
    """Print some of the page's blocks, and write results.json and report.html."""
    print_blocks(shown)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / OUTPUTS[0], results, f"probemb {name}")
    write_page(out / OUTPUTS[1], page, f"probemb {name}")
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)
