"""The deterministic part of a model in open_clip's own format."""

from __future__ import annotations

from pathlib import Path

import torch
from open_clip import CLIP
from torch import Tensor

from probemb.errors import UserError
from probemb.models.architectures import is_open_clip, read_architecture, stock_parameter_names
from probemb.models.dual_encoder import DualEncoder
from probemb.models.formats.open_clip_folder import CONFIG, PREPROCESSING, WEIGHTS
from probemb.models.hub import write_model

WITHOUT_BIAS = "open_clip_model_without_bias.safetensors"


def export_open_clip(model: DualEncoder, folder: str | Path) -> Path:
    """Write the means' part of a model as a folder that open_clip loads strictly, with equal outputs.

        open_clip.create_model_and_transforms("local-dir:FOLDER")
        open_clip.create_model_and_transforms("ViT-B-16", pretrained="FOLDER/open_clip_model.safetensors")

    The second form, which CLIP_benchmark uses, knows only open_clip's own architectures and their own preprocessing. It
    refuses a logit bias where the architecture has none, so that models of a sigmoid loss have a second file for it,
    WITHOUT_BIAS. The uncertainty branch, a and b are left out; what remains is a CLIP. A crop_pct stays in the folder's
    configuration, where `load_model` finds it and open_clip, which has no such step, ignores it.

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
    state, shape = deterministic_state(model), config["architecture"]
    plain = _plain_state(state, shape)
    about = {
        "model_cfg": {**shape, "custom_text": True} if plain is None else shape,
        "preprocess_cfg": {key: value for key, value in config["preprocess"].items() if key in PREPROCESSING},
    }
    tensors = state if plain is None else plain
    files = {WEIGHTS[0]: tensors}
    named = read_architecture(config["name"])  # None of a model that open_clip has no name for
    if "logit_bias" in tensors and named and named.get("init_logit_bias") is None:
        bare = {name: x for name, x in tensors.items() if name != "logit_bias"}
        files = {WITHOUT_BIAS: bare, **files}  # the configuration has the digest of the last one
    for name, held in files.items():
        write_model(folder / name, held, folder / CONFIG, about)
    return folder


def deterministic_state(model: DualEncoder) -> dict[str, Tensor]:
    """open_clip's state dict of the means' part, on the CPU; the scalars have shape (), as open_clip has them."""
    state = model.state_dict()
    names = stock_parameter_names(model.config["architecture"])
    out = {name: state[name].detach().cpu().contiguous() for name in names}
    return {name: x.reshape(()) if name in ("logit_scale", "logit_bias") else x for name, x in out.items()}


def _plain_state(state: dict[str, Tensor], architecture: dict) -> dict[str, Tensor] | None:
    """The state under the names of open_clip's plain `CLIP`, which has its text tower's parameters at the top.

    None for architectures that are no plain CLIP in open_clip. `CustomTextCLIP` reads these names too.
    """
    if (
        architecture.get("custom_text")
        or "multimodal_cfg" in architecture
        or "hf_model_name" in architecture["text_cfg"]
    ):
        return None
    with torch.device("meta"):
        options = {key: value for key, value in architecture.items() if key != "custom_text"}
        expected = set(CLIP(**options).state_dict())
    plain = {name.removeprefix("text."): x for name, x in state.items()}
    return plain if set(plain) == expected else None
