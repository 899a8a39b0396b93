"""All methods by their names on the command line, one file per family; configs/ has their recipes."""

from finetune.methods import autoencoders, composed, points, probabilistic, regions
from finetune.methods.base import Method, variant

GROUPS: dict[str, dict[str, type[Method]]] = {
    "PCME++": {
        "pcmepp": probabilistic.PCMEPlusPlus,
        "pcmepp-clip": probabilistic.PCMEPlusPlus,
        "pcmepp-mu": variant(probabilistic.PCMEPlusPlus, probabilistic=False),
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
        "vse0": points.VSE,
        "vsepp": points.VSE,
        "order": points.Order,
        "pvse": points.PVSE,
        "daa": points.DAA,
        "p2rm": points.P2RM,
    },
    "noisy captions": {"ncr": points.NCR, "decl": points.DECL},
    "regions": {"scan": regions.SCAN, "vsrn": regions.VSRN},
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
        "mpc-mlp": variant(composed.MPC, composer="mlp"),
        "mpc-cosine": variant(composed.PCMEAddition, composer="product"),
        "pcme-addition": composed.PCMEAddition,
        "relationship": variant(composed.TIRG, composer="relationship"),
        "film": variant(composed.TIRG, composer="film"),
        "mrn": variant(composed.TIRG, composer="mrn"),
        "tirg": composed.TIRG,
    },
}
METHODS: dict[str, type[Method]] = {name: cls for group in GROUPS.values() for name, cls in group.items()}
