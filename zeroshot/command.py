"""Options that every evaluation takes, and reading them; without heavy imports, for --help."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from jsonargparse.typing import ClosedUnitInterval

from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Count, Folder, Resize, Workers
from probemb.errors import UserError


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of every evaluation.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        data: what the command reads.
        out: folder for results.json and report.html; by default a folder of the command's name in the run folder.
        resize: backend for resizing: pil, as open_clip and CLIP_benchmark, or tensor (torch: faster, and within a
            rounding of PIL's pixels).
        batch_size: images or crops in a batch.
        text_batch_size: texts in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    model: str = ""
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
        data: webdataset shards with captions, a Karpathy json, precomp caption files, with regions or without, or CUB.
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        images: the folder of the images that a json or caption file names.
        exif: turn images as their EXIF orientation says; open_clip and CLIP_benchmark do not.
    """

    data: str = ""
    split: str | None = "auto"
    images: str | None = None
    exif: bool = False


SHARED = ("model", "data", "images", "out", "batch_size", "workers", "device", "precision")  # in brief --help
Config = TypeVar("Config", bound=EvaluationConfig)


def read_options(
    config_class: type[Config], command: str, description: str, argv: Sequence[str] | None, data: str
) -> Config:
    """The options of `python -m zeroshot.COMMAND`, of which --model and --data must be given.

    `data`: what it reads, in words. Raises UserError.
    """
    prog = f"python -m zeroshot.{command}"
    config = parse_config(config_class, prog, description, argv)
    for option, what in (("model", "a run, a model folder or a hub name"), ("data", data)):
        if not getattr(config, option):
            raise UserError(f"--{option} is missing.", f"Name {what}: `{prog} --model runs/x --data PATH`.")
    return config
