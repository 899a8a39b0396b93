"""Probabilistic image-text embeddings: every image and every text is a diagonal normal distribution.

The library knows no training stage, no cluster and no run folder. Names are loaded on first use, so that
`import probemb` (and with it every command's `--help`) costs nothing.
"""

from importlib import import_module

_HOME = {
    "Gaussian": "probemb.gaussian",
    "PairwiseMatchLoss": "probemb.losses",
    "create_model": "probemb.models",
    "load_model": "probemb.models",
    "save_model": "probemb.models",
    "UserError": "probemb.errors",
}
__all__ = ["Gaussian", "PairwiseMatchLoss", "UserError", "create_model", "load_model", "save_model"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'probemb' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
