"""Losses, one file per family of methods: functions that return a LossOutput, the scalar to minimise and its parts."""

from probemb.losses.clip import clip_loss, infonce_loss, ring_clip_loss
from probemb.losses.match import PairwiseMatchLoss, pairwise_match_loss, ring_match_loss
from probemb.losses.output import LossOutput
from probemb.losses.prolip import prolip_loss, siglip_loss

__all__ = ["LossOutput", "PairwiseMatchLoss", "clip_loss", "infonce_loss", "pairwise_match_loss", "prolip_loss"]
__all__ += ["ring_clip_loss", "ring_match_loss", "siglip_loss"]
