"""Options of this stage's commands; without heavy imports, for --help."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    restricted_number_type,
)

from probemb.cli.ranges import Count, Folder, Resize, Seed, Share, Workers

# Marks in each command's files, so that it replaces no others.
GENERATOR = "probemb zeroshot"
RETRIEVAL_GENERATOR = "probemb retrieval"
DEFAULT_MODEL = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"
DEFAULT_DATA = "data/imagenet/val"
Inputs = restricted_number_type("Inputs", int, [(">=", 4), ("<=", 10_000)])
Groups = restricted_number_type("Groups", int, [(">=", 2), ("<=", 9)])  # as many as there are colours


@dataclass(frozen=True)
class ImagenetConfig:
    """`python -m zeroshot.imagenet`.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        data: class folders, a folder or pattern of webdataset shards, one tar, CIFAR's binary files, or a data set of
            CLIP_benchmark; several of them for one table: --data a b c, or NAME=PATH for a name of its own.
        filter: single, all, topk, best-topk, weighted, inverse-variance, class-deviation, threshold, quantile,
            reweighted, reweighted-unlabelled, several of them separated by commas, or every.
        classes: a class-name file, or "imagenet"; by default classes.json or classes.txt beside the data.
        templates: a file with one prompt template a line, each with {}, or a JSON object of each class's own prompts,
            {class name: [prompts]}; by default the data's own, else CLIP's 80.
        labels: a file of "NAME LABEL" lines, for images without class folders.
        k: prompts that topk keeps; by default the best number on these images, an oracle.
        temperature: of weighted, in standard deviations of a class' uncertainties.
        deviations: class-deviation keeps prompts below a class' mean uncertainty + so many standard deviations.
        threshold: uncertainty below which threshold keeps a prompt of any class.
        quantile: share of the most certain of all prompts that quantile keeps.
        shots: labelled images of each class for reweighted.
        unlabelled: images, without their labels, for reweighted-unlabelled.
        prior: pseudo-images of each class, evenly over its prompts, for both; 0 for maximum likelihood.
        select_on: where K and other settings are chosen, and prompts re-weighted: oracle (on the scored images), or in
            addition train (with select_data) or folds:5, which are few-shot.
        select_data: labelled images to choose on, for --select-on train; of several data sets, one for each.
        out: folder for results.json and report.html, and for a folder of each of several data sets; by default
            zeroshot/ in the run folder.
        exif: turn images as their EXIF orientation says; open_clip and CLIP_benchmark do not.
        resize: backend for resizing: pil, as open_clip and CLIP_benchmark, or tensor (torch: faster, and within a
            rounding of PIL's pixels).
        batch_size: images in a batch.
        text_batch_size: prompts in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
        cache: folder of cached prompt embeddings; --no-cache (null in a file) turns it off.
    """

    model: str = DEFAULT_MODEL
    data: list[str] | str = DEFAULT_DATA
    filter: str = "best-topk"
    classes: str | None = None
    templates: str | None = None
    labels: str | None = None
    k: Count | None = None
    temperature: PositiveFloat = 1.0
    deviations: float | None = None
    threshold: PositiveFloat | None = None
    quantile: Share | None = None
    shots: Count = 16
    unlabelled: Count = 2000
    prior: NonNegativeFloat = 10.0
    select_on: str = "oracle"
    select_data: list[str] | str | None = None
    out: Folder | None = None
    exif: bool = False
    resize: Resize = "pil"
    batch_size: Count = 64
    text_batch_size: Count = 256
    workers: Workers | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad: ClosedUnitInterval = 0.05
    cache: str | None = "~/.cache/probemb/prompts"


@dataclass(frozen=True)
class ToleranceWeights:
    """Weights of the variances in the ranking `tolerance`: 1 is CSD, 0 the means, below 0 a tolerance.

    Args:
        i2t: of the captions, searched with an image; with t2i, instead of weights that are chosen.
        t2i: of the images, searched with a caption.
    """

    i2t: float | None = None
    t2i: float | None = None


@dataclass(frozen=True)
class RetrievalConfig:
    """`python -m zeroshot.retrieval`.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        second: another model, evaluated together with the first by the mean of their similarities; auto: the second
            network of the run that --model names, if it trained two; --no-second for none.
        data: webdataset shards with captions, a Karpathy json, precomp caption files, with regions or without, or CUB.
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        images: the folder of the images that a json or caption file names.
        benchmarks: coco, cxc, eccv, pmrp, separated by commas; by default all that the data allows.
        instances: COCO's instances_val2014.json, or a file of its form: which objects the images show, for pmrp.
        rankings: csd, mean, wasserstein2, match-probability, tolerance, faiss-mean, faiss-rerank, faiss-csd,
            log-likelihood, inclusion, kl, reverse-kl, min-kl, symmetric-kl, bhattacharyya, average-l2, multi-instance,
            attention, order, separated by commas; by default the first eight, and the one it was trained for.
        tolerance: weights of the variances in the ranking tolerance; without them they are chosen on --select-data, or
            on these images, an oracle.
        select_data: other images with captions, to choose the weights of tolerance on.
        select_split: their split; --no-select-split: all of them.
        select_metric: what the weights are chosen by: map-at-r-true (of all true captions), map-at-r or recall (mean of
            R@1, R@5 and R@10; both of own captions); auto: the first where all true captions are known, else recall.
        factory: the FAISS index of the faiss rankings, such as Flat, HNSW32 or IVF256,Flat.
        candidates: how many neighbours of the means faiss-rerank re-ranks.
        samples: samples of each item for match-probability.
        judgements: a file of people's judgements of pairs: judgements.tsv, or Flickr8k's CrowdFlowerAnnotations.txt.
        compare: results of another model with the same --judgements (a folder), to be compared with.
        uncertainty: sum (of the variances), log-det (of the covariance) or geometric-mean (of the standard deviations).
        erased: how many images, and captions, are partly erased to see their uncertainty grow; 0 skips that.
        out: folder for results.json and report.html; by default retrieval/ in the run folder.
        exif: turn images as their EXIF orientation says; open_clip and CLIP_benchmark do not.
        resize: backend for resizing: pil, as open_clip and CLIP_benchmark, or tensor (torch: faster, and within a
            rounding of PIL's pixels).
        batch_size: images in a batch.
        text_batch_size: captions in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    COMMON: ClassVar = (
        *("model", "data", "split", "images", "benchmarks", "rankings", "tolerance", "select_data", "factory"),
        *("judgements", "compare", "out", "exif", "batch_size", "workers", "device", "precision"),
    )

    model: str = ""
    second: str | None = "auto"
    data: str = ""
    split: str | None = "auto"
    images: str | None = None
    benchmarks: str | None = None
    instances: str | None = None
    rankings: str | None = None
    tolerance: ToleranceWeights = field(default_factory=ToleranceWeights)
    select_data: str | None = None
    select_split: str | None = "val"
    select_metric: Literal["auto", "map-at-r-true", "map-at-r", "recall"] = "auto"
    factory: str = "Flat"
    candidates: Count = 100
    samples: Count = 8
    judgements: str | None = None
    compare: str | None = None
    uncertainty: Literal["sum", "log-det", "geometric-mean"] = "sum"
    erased: NonNegativeInt = 200
    out: Folder | None = None
    exif: bool = False
    resize: Resize = "pil"
    batch_size: Count = 64
    text_batch_size: Count = 256
    workers: Workers | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad: ClosedUnitInterval = 0.05


@dataclass(frozen=True)
class AnalysisConfig:
    """Options of every analysis of one model on images with captions.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        data: webdataset shards with captions, a Karpathy json, caption files, or CUB.
        split: train, val or test; auto: test where the data has several splits, else all of it; --no-split: all of it.
        images: the folder of the images that a json or caption file names.
        out: folder for results.json and report.html; by default a folder of the command's name in the run folder.
        exif: turn images as their EXIF orientation says; open_clip and CLIP_benchmark do not.
        resize: backend for resizing: pil, as open_clip and CLIP_benchmark, or tensor (torch: faster, and within a
            rounding of PIL's pixels).
        seed: of what is chosen at random.
        batch_size: images in a batch.
        text_batch_size: captions in a batch.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
    """

    model: str = ""
    data: str = ""
    split: str | None = "auto"
    images: str | None = None
    out: Folder | None = None
    exif: bool = False
    resize: Resize = "pil"
    seed: Seed = 0
    batch_size: Count = 64
    text_batch_size: Count = 256
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"


@dataclass(frozen=True)
class AlgebraConfig(AnalysisConfig):
    """`python -m zeroshot.set_algebra`.

    Args:
        inputs: images, and captions, to mix and to erase parts of.
        examples: pairs that are drawn as ellipses.
    """

    inputs: Inputs = 200
    examples: Count = 3


@dataclass(frozen=True)
class EllipsesConfig(AnalysisConfig):
    """`python -m zeroshot.ellipses`.

    Args:
        groups: classes to draw, or single images where the data has no classes; at most 9.
        per_group: images of a class.
        generic: a caption that says nothing, such as "this bird has unk unk"; drawn with a region of 99 %.
    """

    groups: Groups = 9
    per_group: Count = 6
    generic: str | None = None
