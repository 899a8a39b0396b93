"""All methods by name, one file per family. A family's file is imported when one of its methods is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.methods.base import Method

GROUPS = {  # name on the command line: file and class
    "PCME++": {
        "pcmepp": "pcmepp:PCMEPlusPlus",
        "pcmepp-clip": "pcmepp:PCMEPlusPlusCLIP",
        "pcmepp-mu": "pcmepp:PCMEPlusPlusMean",
    },
    "probabilistic": {
        "prolip": "probabilistic:ProLIP",
        "pcme": "probabilistic:PCME",
        "prob-vsepp": "probabilistic:ProbVSEPlusPlus",
        "prob-vsrn": "regions:ProbVSRN",
    },
    "triplets and InfoNCE": {
        "infonce": "points:InfoNCE",
        "vse": "points:VSE",
        "vse0": "points:VSE0",
        "vsepp": "points:VSEPlusPlus",
        "order": "points:Order",
        "pvse": "points:PVSE",
        "daa": "points:DAA",
        "p2rm": "points:P2RM",
    },
    "noisy captions": {
        "ncr": "noisy:NCR",
        "decl": "noisy:DECL",
    },
    "regions": {
        "scan": "regions:SCAN",
        "vsrn": "regions:VSRN",
    },
    "autoencoders": {
        "mse": "autoencoders:MSE",
        "mmd-mse": "autoencoders:MMDMSE",
        "jwae-mse": "autoencoders:JWAEMSE",
        "jwae-mh": "autoencoders:JWAEMH",
        "vae-mh": "autoencoders:VAEMH",
        "jwae-scan": "autoencoders:JWAESCAN",
    },
    "composed": {
        "mpc": "composed:MPC",
        "mpc-mlp": "composed:MPCMLP",
        "mpc-cosine": "composed:MPCCosine",
        "pcme-addition": "composed:PCMEAddition",
        "relationship": "composed:Relationship",
        "film": "composed:FiLM",
        "mrn": "composed:MRN",
        "tirg": "composed:TIRG",
    },
    "trains nothing": {
        "clip-zs": "points:ZeroShot",
    },
}
_HOME = {name: home for group in GROUPS.values() for name, home in group.items()}


class _Methods(Mapping[str, "type[Method]"]):
    def __getitem__(self, name: str) -> type[Method]:
        file, cls = _HOME[name].split(":")
        return getattr(import_module(f"finetune.methods.{file}"), cls)

    def __contains__(self, name: object) -> bool:
        return name in _HOME

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


METHODS = _Methods()
