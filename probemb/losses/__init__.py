"""Losses, one file per family of methods. Each returns a LossOutput: the scalar to minimise and its parts."""

from probemb.losses.clip import ClipLoss, InfoNCELoss, clip_loss, infonce_loss, ring_clip_loss
from probemb.losses.composed import SampledCosineLoss, ScaledCosineLoss, target_softmax
from probemb.losses.match import PairwiseMatchLoss, pairwise_match_loss, ring_match_loss, vib_kl
from probemb.losses.mpc import MPCLoss, expected_similarity, sampled_similarity
from probemb.losses.noisy import (
    CaptionSimilarity,
    DAALoss,
    DECLLoss,
    NCRLoss,
    P2RMLoss,
    caption_tfidf,
    clean_probability,
    daa_loss,
    decl_correspondence,
    decl_loss,
    ncr_loss,
    point_to_rectangle,
    refine_labels,
    split_clean,
)
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity
from probemb.losses.pcme import PCMELoss, pcme_loss
from probemb.losses.prolip import ProLIPLoss, inclusion_loss, siglip_loss
from probemb.losses.triplet import (
    OrderLoss,
    PVSELoss,
    TripletLoss,
    diversity,
    gaussian_similarity,
    mmd,
    multi_instance_similarity,
    order_similarity,
    prob_triplet_loss,
    scan_loss,
    triplet_loss,
)

__all__ = [
    "CaptionSimilarity",
    "ClipLoss",
    "DAALoss",
    "DECLLoss",
    "InfoNCELoss",
    "LossOutput",
    "MPCLoss",
    "NCRLoss",
    "OrderLoss",
    "P2RMLoss",
    "PCMELoss",
    "PVSELoss",
    "PairwiseMatchLoss",
    "ProLIPLoss",
    "SampledCosineLoss",
    "ScaledCosineLoss",
    "TripletLoss",
    "caption_tfidf",
    "clean_probability",
    "clip_loss",
    "cosine_similarity",
    "daa_loss",
    "decl_correspondence",
    "decl_loss",
    "diversity",
    "expected_similarity",
    "gaussian_similarity",
    "inclusion_loss",
    "infonce_loss",
    "mmd",
    "multi_instance_similarity",
    "ncr_loss",
    "order_similarity",
    "pairwise_match_loss",
    "pcme_loss",
    "point_to_rectangle",
    "prob_triplet_loss",
    "refine_labels",
    "ring_clip_loss",
    "ring_match_loss",
    "sampled_similarity",
    "scan_loss",
    "siglip_loss",
    "split_clean",
    "target_softmax",
    "triplet_loss",
    "vib_kl",
]
