"""Losses, one file per family of methods: functions that return a LossOutput, the scalar to minimise and its parts."""

from importlib import import_module

from probemb.losses.clip import clip_loss, infonce_loss, ring_clip_loss
from probemb.losses.match import PairwiseMatchLoss, pairwise_match_loss, ring_match_loss
from probemb.losses.output import LossOutput
from probemb.losses.prolip import prolip_loss, siglip_loss

__all__ = ["LossOutput", "PairwiseMatchLoss", "clip_loss", "infonce_loss", "pairwise_match_loss", "prolip_loss"]
__all__ += ["ring_clip_loss", "ring_match_loss", "siglip_loss", "triplet_loss"]


def __getattr__(name: str):
    if name != "triplet_loss":  # its file reads tokens, which pretraining has no use for
        raise AttributeError(f"module 'probemb.losses' has no attribute {name!r}")
    return import_module("probemb.losses.triplet").triplet_loss
