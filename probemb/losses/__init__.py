"""Losses, one file per family of methods. Each returns a LossOutput: the scalar to minimise and its parts."""

from probemb.losses.clip import ClipLoss, clip_loss
from probemb.losses.match import PairwiseMatchLoss, pairwise_match_loss, vib_kl
from probemb.losses.output import LossOutput

__all__ = ["ClipLoss", "LossOutput", "PairwiseMatchLoss", "clip_loss", "pairwise_match_loss", "vib_kl"]
