"""The model and the data of an analysis (`zeroshot.set_algebra`, `zeroshot.ellipses`, `zeroshot.hierarchy`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.errors import UserError
from zeroshot.config import AnalysisConfig

if TYPE_CHECKING:
    from probemb.data.captions.find import CaptionDataset
    from probemb.evaluation.embedding import Embedder

OUTPUTS = ("results.json", "report.html")


class Opened(NamedTuple):
    """A probabilistic model with its data, and the folder of the results."""

    embedder: Embedder
    captions: CaptionDataset
    out: Path


def open_analysis(config: AnalysisConfig, command: str, generator: str) -> Opened:
    """Find the data, claim the folder of the results, and load the model.

    Args:
        command: its name, `set_algebra`, which the folder of the results bears too.

    Raises:
        UserError: --model or --data is missing or wrong; the model predicts no variances, or several embeddings.
    """
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", "images with captions")):
        if not getattr(config, option):
            raise UserError(
                f"--{option} is missing.", f"Name {what}: `python -m zeroshot.{command} --model runs/x --data PATH`."
            )
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import claim_files, results_folder
    from probemb.data.captions.find import find_captions
    from probemb.evaluation.embedding import Embedder
    from probemb.models import check_images, load_model

    captions = find_captions(config.data, config.split, config.images, exif=config.exif)
    _ = captions.images  # refuses data with missing images
    out = results_folder(config.out, config.model, command, f"zeroshot-results/{command}")
    claim_files(out, OUTPUTS, generator)
    device = choose_device(config.device, config.precision)
    print(
        f"{config.model} on {captions.source}, {len(captions):,} images, on {device.name} in {device.precision}",
        flush=True,
    )
    loaded = load_model(config.model, device.name, config.resize)
    if not loaded.model.probabilistic or loaded.model.n_embeddings > 1:
        has = "several embeddings of an item" if loaded.model.n_embeddings > 1 else "no variances"
        raise UserError(f"{config.model} is a model with {has}.", "Name one with a mean and a variance of every item.")
    check_images(loaded.model, captions.images)
    embedder = Embedder(
        loaded.model, loaded.tokenizer, loaded.transforms.evaluate, device, config.batch_size, config.text_batch_size,
        show=progress,
    )  # fmt: skip
    return Opened(embedder, captions, out)


def read_pixels(opened: Opened, wanted: int, seed: int) -> tuple[list[int], list]:
    """The first readable ones of the images in an order drawn from the seed: their rows in the data, and pixels.

    Raises:
        UserError: fewer than four can be read.
    """
    import torch

    from probemb.data.failures import BadSample

    rows, pixels = [], []
    order = torch.randperm(len(opened.captions), generator=torch.Generator().manual_seed(seed)).tolist()
    with opened.embedder.show("reading images", min(wanted, len(order))) as advance:
        for row in order:
            if len(rows) == wanted:
                break
            try:
                pixels.append(opened.embedder.transform(opened.captions.images.open(row)))
            except BadSample:
                continue
            rows.append(row)
            if advance:
                advance(1)
    if len(rows) < 4:  # so that each pair has another one beside it with no image in common
        raise UserError(f"{opened.captions.source} has fewer than four images that can be read.", "Name other data.")
    return rows, pixels
