"""Start and end of every evaluation: claim the folder, load the model, show and write."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
from probemb.reports.pages import Page, print_page, write_page
from probemb.reports.results import claim_files, results_folder, write_json
from probemb.reports.text import printable
from zeroshot.command import CaptionConfig, EvaluationConfig

UNKNOWN = 20  # unknown words that are named
OUTPUTS = ("results.json", "report.html")
ABOUT_U = (
    "u measures ambiguity within the training domain: how many things an input could match. It does not tell whether "
    "the model knows an input, nor is it always the best predictor of a wrong answer: zeroshot.uncertainty compares it."
)


@dataclass(frozen=True)
class Run:
    """A command with the folder of its results, and the model that it evaluates."""

    config: EvaluationConfig
    name: str
    out: Path
    embedder: Embedder

    def finish(self, results: dict, page: Page, bad: Sequence[tuple[str, str]] = (), split: str | None = None) -> dict:
        """Print the page's paragraphs and tables, write report.html and results.json, and return what that holds.

        bad: (name, reason) of images that could not be read; split: of the data, for a command that has one.
        """
        chosen = {"split": split} if hasattr(self.config, "split") else {}
        content = {
            "config": to_dict(self.config) | chosen,
            "device": self.embedder.device.name,
            "precision": self.embedder.device.precision,
            "images_left_out": [{"name": name, "reason": reason} for name, reason in bad],
            **results,
        }
        if bad:
            print(describe_bad(bad), flush=True)
            page = page._replace(lead=f"{page.lead}; {len(bad):,} images could not be read and are left out")
        print_page(page)
        self.out.mkdir(parents=True, exist_ok=True)
        files = [self.out / name for name in OUTPUTS]
        write_json(files[0], content, f"probemb {self.name}")
        write_page(files[1], page, f"probemb {self.name}")
        print(f"\nwritten: {files[0]}, {files[1]}", flush=True)
        return content


def claim(config: EvaluationConfig, name: str) -> Path:
    """The folder of the results: --out, or `name` in the run folder. Raises UserError: it holds other files."""
    elsewhere = "zeroshot-results" if name == "zeroshot" else f"zeroshot-results/{name}"
    out = results_folder(config.out, config.model, name, elsewhere)
    claim_files(out, OUTPUTS, f"probemb {name}")
    if (held := out / OUTPUTS[0]).exists():
        old = json.loads(held.read_text(encoding="utf-8"))["written"]
        print(f"replaces what {out} holds, of {old['date']}: {old['command']} (--out FOLDER keeps it)", flush=True)
    return out


def start(config: EvaluationConfig, name: str, models: Sequence[str] = ()) -> Run:
    """Claim the folder, and load the model of --model, or several as one. Raises UserError."""
    return Run(config, name, claim(config, name), open_model(config, models))


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


def start_analysis(config: CaptionConfig, name: str) -> tuple[Run, CaptionDataset]:
    """`start` of an analysis of single Gaussians, and its data. Raises UserError: the model has no such."""
    captions, run = open_captions(config), start(config, name)
    model = run.embedder.model
    if not model.probabilistic or model.n_embeddings > 1:
        remedy = "Name one with a mean and a variance of every item."
        raise UserError(f"{config.model} has no variances, or several embeddings of an item.", remedy)
    check_images(model, captions.images)
    return run, captions


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


def unknown_notice(tokenizer, texts: Sequence[str], what: str) -> list[str]:
    """A warning in a list if the model does not know some words of the texts."""
    words = unknown_words(tokenizer, texts)
    if not words:
        return []
    some = printable(", ".join(words[:UNKNOWN])) + (", …" if len(words) > UNKNOWN else "")
    return [f"{len(words):,} words of the {what} are unknown to the model, which reads them all alike: {some}"]
