"""All methods by name. A family's file is imported when one of its methods is looked up, and torch when it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from finetune.methods.base import Method

_HOME = {  # name on the command line: file and class
    "pcmepp": "pcmepp:PCMEPlusPlus",
    "pcmepp-clip": "pcmepp:PCMEPlusPlusCLIP",
    "pcmepp-mu": "pcmepp:PCMEPlusPlusMean",
    "prolip": "prolip:ProLIP",
    "infonce": "vse:InfoNCE",
    "vse": "vse:VSE",
    "vse0": "embeddings:VSE0",
    "vsepp": "embeddings:VSEPlusPlus",
    "order": "embeddings:Order",
    "pvse": "embeddings:PVSE",
    "pcme": "pcme:PCME",
    "daa": "vse:DAA",
    "p2rm": "vse:P2RM",
    "ncr": "noisy:NCR",
    "decl": "noisy:DECL",
    "mse": "jwae:MSE",
    "mmd-mse": "jwae:MMDMSE",
    "jwae-mse": "jwae:JWAEMSE",
    "jwae-mh": "jwae:JWAEMH",
    "vae-mh": "jwae:VAEMH",
    "jwae-scan": "jwae_scan:JWAESCAN",
    "prob-vsepp": "prob_vse:ProbVSEPlusPlus",
    "scan": "scan:SCAN",
    "vsrn": "vsrn:VSRN",
    "prob-vsrn": "vsrn:ProbVSRN",
    "mpc": "composed:MPC",
    "mpc-mlp": "composed:MPCMLP",
    "mpc-cosine": "composed:MPCCosine",
    "pcme-addition": "composed:PCMEAddition",
    "relationship": "composed:Relationship",
    "film": "composed:FiLM",
    "mrn": "composed:MRN",
    "tirg": "composed:TIRG",
    "clip-zs": "vse:ZeroShot",
}


class _Methods(Mapping[str, type[Method]]):
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
