"""All methods by name. A family's file is imported when one of its methods is looked up, and torch when it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from finetune.methods.base import Method

GROUPS = {  # name on the command line: file and class
    "PCME++": {
        "pcmepp": "pcmepp:PCMEPlusPlus",
        "pcmepp-clip": "pcmepp:PCMEPlusPlusCLIP",
        "pcmepp-mu": "pcmepp:PCMEPlusPlusMean",
    },
    "probabilistic": {
        "prolip": "prolip:ProLIP",
        "pcme": "pcme:PCME",
        "prob-vsepp": "prob_vse:ProbVSEPlusPlus",
        "prob-vsrn": "vsrn:ProbVSRN",
    },
    "triplets and InfoNCE": {
        "infonce": "vse:InfoNCE",
        "vse": "vse:VSE",
        "vse0": "embeddings:VSE0",
        "vsepp": "embeddings:VSEPlusPlus",
        "order": "embeddings:Order",
        "pvse": "embeddings:PVSE",
        "daa": "vse:DAA",
        "p2rm": "vse:P2RM",
    },
    "noisy captions": {
        "ncr": "noisy:NCR",
        "decl": "noisy:DECL",
    },
    "regions": {
        "scan": "scan:SCAN",
        "vsrn": "vsrn:VSRN",
    },
    "autoencoders": {
        "mse": "jwae:MSE",
        "mmd-mse": "jwae:MMDMSE",
        "jwae-mse": "jwae:JWAEMSE",
        "jwae-mh": "jwae:JWAEMH",
        "vae-mh": "jwae:VAEMH",
        "jwae-scan": "jwae_scan:JWAESCAN",
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
        "clip-zs": "vse:ZeroShot",
    },
}
_HOME = {name: home for group in GROUPS.values() for name, home in group.items()}


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
