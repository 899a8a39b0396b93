"""Losses, one file per family of methods: functions that return a LossOutput, the scalar to minimise and its parts."""

from importlib import import_module

_HOME = {
    "clip": "clip_loss infonce_loss ring_clip_loss",
    "match": "PairwiseMatchLoss pairwise_match_loss ring_match_loss",
    "output": "LossOutput",
    "prolip": "prolip_loss siglip_loss",
    "triplet": "triplet_loss",
}
_MODULES = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'probemb.losses' has no attribute {name!r}")
    return getattr(import_module(f"probemb.losses.{_MODULES[name]}"), name)
