"""The deterministic part of a model in open_clip's own format."""

from __future__ import annotations

from pathlib import Path

from open_clip.transform import PreprocessCfg
from torch import Tensor

from probemb.errors import UserError
from probemb.models.architectures import is_open_clip, stock_parameter_names
from probemb.models.dual_encoder import DualEncoder
from probemb.models.hub import write_model

WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"  # open_clip's names


def export_open_clip(model: DualEncoder, folder: str | Path) -> Path:
    """Write the means' part of a model as a folder that open_clip loads strictly, with equal outputs.

        open_clip.create_model_and_transforms("local-dir:FOLDER")

    The uncertainty branch, a and b are left out; what remains is a CLIP.

    Returns:
        the folder.

    Raises:
        UserError: an architecture or head that open_clip does not have, or a folder that cannot be written.
    """
    folder, config = Path(folder), model.config
    what = None
    if config["head"] != "clip":
        what = f"its head is '{config['head']}'"
    elif not is_open_clip(config["architecture"]):
        what = "open_clip has no such architecture"
    elif config["uncertainty"] != "branch":
        what = "its means depend on an uncertainty token, which open_clip's towers do not have"
    if what:
        raise UserError(
            f"The model ({config['name']}) cannot be exported to open_clip: {what}.",
            "Export a model of one of open_clip's architectures with head 'clip' and an uncertainty branch.",
        )
    about = {
        "model_cfg": {**config["architecture"], "custom_text": True},
        "preprocess_cfg": {key: value for key, value in config["preprocess"].items() if key in vars(PreprocessCfg())},
    }
    write_model(folder / WEIGHTS, deterministic_state(model), folder / CONFIG, about)
    return folder


def deterministic_state(model: DualEncoder) -> dict[str, Tensor]:
    """open_clip's state dict of the means' part, on the CPU; the scalars have shape (), as open_clip has them."""
    state = model.state_dict()
    names = stock_parameter_names(model.config["architecture"])
    out = {name: state[name].detach().cpu().contiguous() for name in names}
    return {name: x.reshape(()) if name in ("logit_scale", "logit_bias") else x for name, x in out.items()}
