"""Contents of an evaluation's results.json."""

from __future__ import annotations

from dataclasses import asdict

from probemb.cli.configuration import to_dict
from probemb.cli.device import Device
from probemb.metrics import Reliability, rejection_curve, reliability, uncertainty_bins
from zeroshot.config import ImagenetConfig
from zeroshot.filtering.outcome import Outcome, Task


def calibration(outcome: Outcome) -> Reliability | None:
    """Confidence of `all` against its accuracy; None for a model without a temperature."""
    e = outcome.evaluation
    return None if e.confidence is None else reliability(e.confidence.clamp(0, 1), e.correct.double())


def selective(outcome: Outcome, probabilistic: bool = True) -> dict:
    """Accuracy of `all` on the images that are left when the most doubtful ones are refused, by two scores."""
    e = outcome.evaluation
    scores = {"uncertainty": outcome.images.uncertainty()} if probabilistic else {}
    if e.confidence is not None:
        scores["confidence"] = 1 - e.confidence
    return {name: asdict(rejection_curve(score, e.correct.double())) for name, score in scores.items()}


def describe(config: ImagenetConfig, outcome: Outcome, task: Task, device: Device, probabilistic: bool = True) -> dict:
    """The content of results.json. Accuracies are shares in [0, 1]; K counts prompts. Of a model that is not
    `probabilistic` nothing is told of uncertainties.
    """
    e, classes = outcome.evaluation, task.classes
    class_u = e.uncertainty.mean(dim=1)
    class_bins = uncertainty_bins(class_u, e.class_all) if probabilistic else None
    image_bins = uncertainty_bins(outcome.images.uncertainty(), e.correct.double()) if probabilistic else None
    return {
        "config": to_dict(config),
        "device": device.name,
        "precision": device.precision,
        "images": len(outcome.labels),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in outcome.bad],
        "classes": len(classes),
        "class_names_from": classes.source,
        "templates": task.templates,
        "notices": outcome.notices,
        "prompt_cache": outcome.cache[0],
        "seconds": outcome.seconds,
        "rows": [asdict(row) for row in e.rows],
        "reweighted": {
            name: {
                "steps": len(found.objective) - 1,
                "objective": [found.objective[0], found.objective[-1]],
                "images_of_class": found.counts,
            }
            for name, found in e.reweighted.items()
        },
        "curve": None if e.curve1 is None else {"top1": e.curve1, "top5": e.curve5},
        "uncertainty": {
            "classes": asdict(class_bins) if class_bins else None,
            "images": asdict(image_bins) if image_bins else None,
        },
        "calibration": None if (ece := calibration(outcome)) is None else asdict(ece) | outcome.scale._asdict(),
        "selective": selective(outcome, probabilistic),
        "per_class": [
            {
                "name": name,
                "key": classes.keys[c] if classes.keys else None,
                "images": e.counts[c],
                "uncertainty": class_u[c] if probabilistic else None,
                "top1_all": e.class_all[c],
                "oracle_k": None if e.oracle_k is None else e.oracle_k[c],
                "oracle_top1_best_topk": None if e.oracle_best_topk is None else e.oracle_best_topk[c],
                "oracle_top1_max_over_k": None if e.oracle_max_over_k is None else e.oracle_max_over_k[c],
            }
            for c, name in enumerate(classes.names)
        ],
    }
