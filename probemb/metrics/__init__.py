"""Metrics of retrieval and of uncertainty: recall, R-Precision, mAP@R, RSUM, the COCO benchmarks, PMRP, calibration."""

from probemb.metrics.bootstrap import Resampled, interval, resample_accuracy
from probemb.metrics.calibration import Reliability, fit_logistic, reliability
from probemb.metrics.coco import coco_benchmarks, coco_depth, coco_query_metrics, coco_rows
from probemb.metrics.composed import closest_items, composed_metrics, roc_auc
from probemb.metrics.judged import PairMetrics, cluster_weights, estimate, pair_metrics
from probemb.metrics.plausible import plausible_match_r_precision
from probemb.metrics.retrieval import (
    Positives,
    first_match_ranks,
    map_at_r,
    mean_metrics,
    query_metrics,
    r_precision,
    rank_both,
    rank_summary,
    ranked_matches,
    ranking,
    recall_at_k,
    retrieval_metrics,
    rsum,
)
from probemb.metrics.selective import PrecisionCurve, highest_threshold, precision_curve
from probemb.metrics.uncertainty import (
    Bins,
    RejectionCurve,
    average_ranks,
    pearson,
    rejection_curve,
    standard_error,
    uncertainty_bins,
)

__all__ = [
    "Bins",
    "PairMetrics",
    "Positives",
    "PrecisionCurve",
    "RejectionCurve",
    "Reliability",
    "Resampled",
    "average_ranks",
    "closest_items",
    "cluster_weights",
    "coco_benchmarks",
    "coco_depth",
    "coco_query_metrics",
    "coco_rows",
    "composed_metrics",
    "estimate",
    "first_match_ranks",
    "fit_logistic",
    "highest_threshold",
    "interval",
    "map_at_r",
    "mean_metrics",
    "pair_metrics",
    "pearson",
    "plausible_match_r_precision",
    "precision_curve",
    "query_metrics",
    "r_precision",
    "rank_both",
    "rank_summary",
    "ranked_matches",
    "ranking",
    "recall_at_k",
    "rejection_curve",
    "reliability",
    "resample_accuracy",
    "retrieval_metrics",
    "roc_auc",
    "rsum",
    "standard_error",
    "uncertainty_bins",
]
