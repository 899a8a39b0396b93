"""The methods that PCME++ is compared with, one file per family; `registry.METHODS` finds them by name."""

from finetune.methods.base import Batch, Method
from finetune.methods.registry import METHODS

__all__ = ["METHODS", "Batch", "Method"]
