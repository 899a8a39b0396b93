"""What `python -m finetune.measure` can be told.

A module of its own, without imports: --help resolves the annotations of the module that a configuration stands in,
and would load torch for the sake of other annotations there.
"""

from dataclasses import dataclass

GENERATOR = "probemb finetune.measure"  # marks the command's own files, so that nobody else's are replaced


@dataclass(frozen=True)
class MeasureConfig:
    """`python -m finetune.measure`.

    Args:
        model: a run folder, a model folder, a .safetensors file, or a published hub name.
        second: another model, measured together with it by the mean of their similarities; auto: the second network of
            the run that --model names, if it has trained two; --no-second for none.
        data: webdataset shards with captions, a Karpathy json, or a folder of precomp caption files.
        split: which part of the data: train, val, test; --no-split takes all of it.
        images: the folder of the images that a json or caption file names.
        benchmarks: coco, cxc, eccv, pmrp, separated by commas; by default all that the data allows, or none.
        instances: COCO's instances_val2014.json (or a file of its form) with the objects of the images, for pmrp.
        rankings: csd, mean, wasserstein2, match-probability, faiss-mean, faiss-rerank, faiss-csd, separated by
            commas; by default all.
        factory: the FAISS index of the faiss rankings: Flat, HNSW32, IVF256,Flat, ...
        candidates: how many neighbours of the means faiss-rerank re-ranks.
        samples: samples of each item for match-probability.
        erased: images, and captions, of which parts are erased to watch their uncertainty; 0 leaves that out.
        out: folder for results.json and report.html; by default measure/ in the run folder.
        batch_size: images in a batch.
        text_batch_size: captions in a batch.
        workers: processes that decode images; by default as the machine allows.
        device: auto, cpu, cuda, cuda:1.
        precision: auto, fp32, bf16, fp16.
        max_bad: largest share of images that may be unreadable.
    """

    model: str = ""
    second: str | None = "auto"
    data: str = ""
    split: str | None = "test"
    images: str | None = None
    benchmarks: str | None = None
    instances: str | None = None
    rankings: str | None = None
    factory: str = "Flat"
    candidates: int = 100
    samples: int = 8
    erased: int = 200
    out: str | None = None
    batch_size: int = 64
    text_batch_size: int = 256
    workers: int | None = None
    device: str = "auto"
    precision: str = "auto"
    max_bad: float = 0.05
