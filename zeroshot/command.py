"""Options that every evaluation takes, and `main` of its command; without heavy imports, for --help."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval

from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Count, Folder, Resize, Workers
from probemb.errors import UserError


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of every evaluation.

    Args:
        model: a run, or anything that load_model reads (docs/models.md); with `pretrained`, one of open_clip's
            architectures.
        pretrained: open_clip's weights: a tag such as openai, or a file.
        data: what the command reads.
        out: folder for results.json and report.html; by default a folder of the command's name in the run folder.
        resize: backend for resizing: tensor (torch, fast) or pil (as open_clip); within a rounding of each other.
        batch_size: images or crops in a batch.
        text_batch_size: texts in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    model: str = ""
    pretrained: str | None = None
    data: str = ""
    out: Folder | None = None
    resize: Resize = "pil"
    batch_size: Count = 64
    text_batch_size: Count = 256
    workers: Workers | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad: ClosedUnitInterval = 0.05


@dataclass(frozen=True)
class CaptionConfig(EvaluationConfig):
    """Options of evaluations on images with captions.

    Args:
        data: images with captions: a table, images with a .txt beside each, shards or a json (docs/data.md).
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        images: folder of the images that a file names.
        exif: apply EXIF orientation; open_clip does not.
    """

    split: str | None = "auto"
    images: str | None = None
    exif: bool = False


def evaluation(name: str, config_class: type[EvaluationConfig], about: str) -> Callable[[Sequence[str] | None], int]:
    """`main` of `python -m zeroshot.NAME`: read the options, then call the function in zeroshot.evaluations.

    Args:
        name: "retrieval" for `retrieval.evaluate`, or "analyses union" for `analyses.union`.
        about: text for --help.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        prog, (module, _, analysis) = f"python -m zeroshot.{name}", name.partition(" ")
        config = parse_config(config_class, prog, about.partition("\n")[0], argv)
        if not (config.model and config.data):
            raise UserError("--model or --data is missing.", f"Name both: `{prog} --model runs/x --data PATH`.")
        if config.pretrained:
            config = replace(config, model=f"{config.model}:{config.pretrained}")
        work = import_module(f"zeroshot.evaluations.{module}")  # now, so that --help is quick
        getattr(work, analysis.replace("-", "_") or "evaluate")(config)
        return 0

    return main
