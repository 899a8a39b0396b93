"""Start and end of every evaluation: claim the folder, load the model, show and write; shared charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from probemb.data.captions.dataset import HELD_OUT, CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.image_loader import Images, describe_bad
from probemb.data.look_alikes import leave_out
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import RankingOptions, fitting, ranking_names
from probemb.machine import choose_device, loader_workers
from probemb.models import as_one, check_images, load_model
from probemb.models.inputs import unknown_words
from probemb.options import to_dict
from probemb.progress import progress
from probemb.reports.pages import Page, Table, print_page, write_page
from probemb.reports.results import claim_files, results_folder, write_json
from probemb.reports.text import percent, plus_minus, printable
from zeroshot.command import CaptionConfig, EvaluationConfig

UNKNOWN = 20  # unknown words that are named
OUTPUTS = ("results.json", "report.html")
ABOUT_U = (
    "u measures ambiguity within the training domain: how many things an input could match. It does not tell whether "
    "the model knows an input, nor is it always the best predictor of a wrong answer."
)
OUTCOMES = {"ambiguity": "true ambiguity", "accepted_share": "human acceptance", "r@1": "R@1"}


def claim(config: EvaluationConfig, name: str) -> Path:
    """The folder of the results: --out, or `name` in the run folder. Raises UserError: it holds other files."""
    elsewhere = "zeroshot-results" if name == "zeroshot" else f"zeroshot-results/{name}"
    out = results_folder(config.out, config.model, name, elsewhere)
    claim_files(out, OUTPUTS, f"probemb {name}")
    return out


def open_captions(config: CaptionConfig) -> CaptionDataset:
    """The images with captions of --data. Raises UserError: images are missing."""
    captions = find_captions(config.data, config.split, config.images, exif=config.exif, held_out=HELD_OUT)
    if captions.drawn:
        print(f"{captions.source} has no splits: {captions.split} is drawn, {len(captions):,} images", flush=True)
    _ = captions.images  # refuses data with missing images
    return captions


def open_model(config: EvaluationConfig, names: Sequence[str] = ()) -> Embedder:
    """The model of --model, or those of several names as one, ready to embed. Raises UserError."""
    device = choose_device(config.device, config.precision)
    names = names or [config.model]
    loaded = [load_model(name, device.name, config.resize) for name in names]
    print(f"{' and '.join(names)} on {config.data}, on {device.name} in {device.precision}", flush=True)
    return Embedder(
        as_one([one.model for one in loaded]), loaded[0].tokenizer, loaded[0].transforms.evaluate, device,
        config.batch_size, config.text_batch_size, config.workers, config.max_bad, progress,
    )  # fmt: skip


def open_analysis(config: CaptionConfig, name: str) -> tuple[Embedder, CaptionDataset, Path]:
    """Model, data and folder of an analysis of single Gaussians. Raises UserError: the model has no such."""
    captions, out, embedder = open_captions(config), claim(config, name), open_model(config)
    if not embedder.model.probabilistic or embedder.model.n_embeddings > 1:
        remedy = "Name one with a mean and a variance of every item."
        raise UserError(f"{config.model} has no variances, or several embeddings of an item.", remedy)
    check_images(embedder.model, captions.images)
    return embedder, captions, out


def unseen_rows(found: Images, evaluated: Images, workers: int | None) -> tuple[list[int], list[str]]:
    """The rows of images to choose on that show no evaluated picture, and a notice if some do. Raises UserError."""
    rows, notice = leave_out(found, evaluated, loader_workers(workers, len(found) + len(evaluated), "cpu"), progress)
    return rows, [notice] if notice else []


def pair_rankings(text: str | None, embedder: Embedder, tokens: bool = True) -> tuple[list[str], RankingOptions]:
    """--rankings of a command that scores single pairs, by default the training's and the means, and their options.

    tokens: they are kept, for the ranking "attention". Raises UserError: a ranking of another kind.
    """
    model = embedder.model
    own = model.ranking if tokens or model.ranking != "attention" else "mean"
    names = list(dict.fromkeys([own, *["mean"] * (model.n_embeddings == 1)])) if text is None else ranking_names(text)
    no_pairs = ("faiss", "tolerance") if tokens else ("faiss", "tolerance", "attention")
    if wrong := [name for name in names if name.startswith(no_pairs)]:
        raise UserError(f"The ranking {wrong[0]} scores no single pairs.", "Choose csd, mean, match-probability, ...")
    options = RankingOptions(*model.match_model.numbers, device=embedder.device.name, attention=model.attention)
    return fitting(names, model, given=True), options


def settings(config: EvaluationConfig, embedder: Embedder, split: str | None = None) -> dict:
    """The first keys of results.json: the options, and where the model ran."""
    resolved = to_dict(config) | ({"split": split} if hasattr(config, "split") else {})
    return {"config": resolved, "device": embedder.device.name, "precision": embedder.device.precision}


def unknown_notice(tokenizer, texts: Sequence[str], what: str) -> list[str]:
    """A warning in a list if the model does not know some words of the texts."""
    words = unknown_words(tokenizer, texts)
    if not words:
        return []
    some = printable(", ".join(words[:UNKNOWN])) + (", …" if len(words) > UNKNOWN else "")
    return [f"{len(words):,} words of the {what} are unknown to the model, which reads them all alike: {some}"]


def left_out(bad: Sequence[tuple[str, str]]) -> list[dict]:
    """Images that could not be read, for results.json; says so on the console too."""
    if bad:
        print(describe_bad(bad), flush=True)
    return [{"name": name, "reason": reason} for name, reason in bad]


def finish(out: Path, name: str, results: dict, page: Page) -> None:
    """Print the page's paragraphs and tables, and write results.json and report.html."""
    if lost := results.get("images_left_out"):
        page = page._replace(lead=f"{page.lead}; {len(lost):,} images could not be read and are left out")
    print_page(page)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / OUTPUTS[0], results, f"probemb {name}")
    write_page(out / OUTPUTS[1], page, f"probemb {name}")
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def predictor_table(found: Mapping[str, Sequence[dict]], title: str) -> Table:
    """The table of what each score of a query predicts (rows of `evaluation.uncertainty.assess`), by kind of query."""
    outcomes = {key: name for key, name in OUTCOMES.items() if any(row[key] for some in found.values() for row in some)}
    rows: list = []
    for queries, some in found.items():
        for row in some:
            halves = [percent(row["halves"][key]) if row["halves"] else "" for key in ("certain", "rest")]
            values = [plus_minus(row[key], 1, 3, signed=True) for key in (*outcomes, "gain")]
            rows.append((queries, row["title"], *values[:-1], *halves, values[-1]))
        rows.append(())
    headings = ("queries", "score, higher means less certain", *outcomes.values(), "certain half", "the rest", "gain")
    title = f"{title}: Spearman, R@1 in percent, gain of refusing (0 at random, 1 at best)"
    return Table(headings, rows, title, left=2)
