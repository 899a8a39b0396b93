"""All methods by their names on the command line, one file per family."""

from finetune.methods import autoencoders, composed, noisy, pcmepp, points, probabilistic, regions
from finetune.methods.base import Method

GROUPS: dict[str, dict[str, type[Method]]] = {
    "PCME++": {
        "pcmepp": pcmepp.PCMEPlusPlus,
        "pcmepp-clip": pcmepp.PCMEPlusPlusCLIP,
        "pcmepp-mu": pcmepp.PCMEPlusPlusMean,
    },
    "probabilistic": {
        "prolip": probabilistic.ProLIP,
        "pcme": probabilistic.PCME,
        "prob-vsepp": probabilistic.ProbVSEPlusPlus,
        "prob-vsrn": regions.ProbVSRN,
    },
    "triplets and InfoNCE": {
        "infonce": points.InfoNCE,
        "vse": points.VSE,
        "vse0": points.VSE0,
        "vsepp": points.VSEPlusPlus,
        "order": points.Order,
        "pvse": points.PVSE,
        "daa": points.DAA,
        "p2rm": points.P2RM,
    },
    "noisy captions": {
        "ncr": noisy.NCR,
        "decl": noisy.DECL,
    },
    "regions": {
        "scan": regions.SCAN,
        "vsrn": regions.VSRN,
    },
    "autoencoders": {
        "mse": autoencoders.MSE,
        "mmd-mse": autoencoders.MMDMSE,
        "jwae-mse": autoencoders.JWAEMSE,
        "jwae-mh": autoencoders.JWAEMH,
        "vae-mh": autoencoders.VAEMH,
        "jwae-scan": autoencoders.JWAESCAN,
    },
    "composed": {
        "mpc": composed.MPC,
        "mpc-mlp": composed.MPCMLP,
        "mpc-cosine": composed.with_composer(composed.PCMEAddition, "product"),
        "pcme-addition": composed.PCMEAddition,
        "relationship": composed.with_composer(composed.TIRG, "relationship"),
        "film": composed.with_composer(composed.TIRG, "film"),
        "mrn": composed.with_composer(composed.TIRG, "mrn"),
        "tirg": composed.TIRG,
    },
    "trains nothing": {
        "clip-zs": points.ZeroShot,
    },
}
METHODS: dict[str, type[Method]] = {name: cls for group in GROUPS.values() for name, cls in group.items()}
