"""Files of saved models: folders, single files and Hugging Face hub names; `load.py` makes them ready for use.

A saved model is a folder with `model.safetensors` and `config.json`. The configuration is also inside the weights file,
so that a model never exists in halves. Both have the SHA-256 of the tensors, which loading compares.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open

from probemb.errors import UserError, nearest
from probemb.models import formats
from probemb.models.architectures import is_open_clip, read_architecture, supported_names
from probemb.models.dual_encoder import DualEncoder
from probemb.models.inputs import create_transforms
from probemb.models.weights import SHA256, load_strictly, read_state_dict, refused, tensors_sha256, write_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED_WEIGHTS = "pytorch_model.bin"  # older hub repositories; read without executing anything
FORMAT = {"format": "probemb", "version": 1}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PREFIX = "hf-hub:"  # open_clip's: looks nowhere else
# First parts of paths, not of repositories: a missing runs/x is not looked for on the hub.
LOCAL_FOLDERS = {"checkpoints", "data", "model", "models", "out", "output", "outputs", "results", "runs", "weights"}


class ModelFiles(NamedTuple):
    """The two files of a saved model; a configuration may be missing, or inside the weights."""

    weights: Path
    config: Path | None


def save_model(model: DualEncoder, folder: str | Path) -> Path:
    """Write `model.safetensors` and `config.json`, each as a whole. Raises UserError: they cannot be written."""
    folder = Path(folder)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_model(folder / WEIGHTS, state, folder / CONFIG, {**FORMAT, **model.config}, embed=True)
    return folder


# ------------------------------------------------------------------------------------------------------------- finding


def is_hub_name(source: str) -> bool:
    """True if a source is looked up on the hub: hf-hub:owner/name, or owner/name that does not look like a path."""
    local = source.partition("/")[0].lower() in LOCAL_FOLDERS or os.path.isdir(os.path.dirname(source))
    local = local or source.endswith((".safetensors", ".pt"))
    return bool(HUB_NAME.fullmatch(source.removeprefix(HUB_PREFIX))) and (source.startswith(HUB_PREFIX) or not local)


def saved_files(source: str | Path) -> ModelFiles | None:
    """The files of a saved model, ours or open_clip's; None for an open_clip tag, or a file of weights alone."""
    weights_alone = os.path.isfile(source) and not read_config(Path(source))
    named = os.path.exists(source) or is_hub_name(str(source))
    return locate(source) if named and not weights_alone else None


def locate(source: str | Path) -> ModelFiles:
    """The files of a saved model. Raises UserError: there is none."""
    path, name, found = Path(source), str(source), None
    if os.path.isfile(path):
        config = path.with_name(formats.CONFIG if path.name in formats.WEIGHTS else CONFIG)
        found = ModelFiles(path, config if config.is_file() else None)
    elif os.path.isdir(path):
        folder = path / "model" if (path / "model" / WEIGHTS).is_file() else path
        found = _first_layout(lambda file: folder / file if (folder / file).is_file() else None)
    elif is_hub_name(name):
        found = _download(name.removeprefix(HUB_PREFIX))
    if not found and (config := read_architecture(name)) and is_open_clip(config):
        what = f"{name} is an architecture, and its weights are not named."
        raise UserError(what, f"Name a file or a tag of open_clip's: --pretrained weights.pt, or {name}:weights.pt.")
    if not found:
        close = nearest(name.partition(":")[0], supported_names()) if ":" in name else ""
        raise UserError(
            f"There is no model at {name[:200]} (tried {WEIGHTS} and {PICKLED_WEIGHTS}, and {formats.CONFIG} with "
            f"{' or '.join(formats.WEIGHTS)}).{close}",
            "Check the path, or the network. Name a run that has saved its model, a folder with model.safetensors and "
            f"config.json, a .safetensors file, a hub name ({HUB_PREFIX}owner/name where a folder could be meant), or "
            "open_clip's architecture and weights (ViT-B-16:weights.pt).",
        )
    return found


def _first_layout(get: Callable[[str], Path | None]) -> ModelFiles | None:
    """The files of a folder or repository, ours or the authors' before open_clip's; `get` gives one, or None."""
    config, names = get(CONFIG), (WEIGHTS, PICKLED_WEIGHTS)
    about = read_config(config) if config else {}
    if about.get("format") != FORMAT["format"] and "vision_cfg" not in about and (theirs := get(formats.CONFIG)):
        config, names = theirs, formats.WEIGHTS
    weights = next(filter(None, map(get, names)), None)
    return weights and ModelFiles(weights, config)


def _download(name: str) -> ModelFiles | None:
    offline = False

    def get(file: str) -> Path | None:
        nonlocal offline
        try:
            return Path(hf_hub_download(name, file, local_files_only=offline))
        except EntryNotFoundError as error:
            offline = isinstance(error, LocalEntryNotFoundError)
            return None

    with refused(
        f"There is no folder {name}, and the hub's {name} could not be read", "Check the name and the network."
    ):
        return _first_layout(get)


# ------------------------------------------------------------------------------------------------------------- reading


def build_saved(
    weights: Path, config_path: Path | None, make: Callable[[dict], DualEncoder] = DualEncoder
) -> DualEncoder:
    """The model of two files, which `make` builds; DualEncoder leaves an adapter behind. Raises UserError: they do not
    fit each other, or the weights are damaged.
    """
    embedded = read_config(weights)
    config = read_config(config_path) if config_path else embedded
    if config is None:
        raise UserError(
            f"{weights} has no configuration.",
            f"Put the {CONFIG} that was saved with it into the same folder; for open_clip's own weights, name the "
            f"architecture too, as in ViT-B-16:{weights.name}.",
        )
    # The one inside is written with the tensors; config.json may be of the state before, after a crash between the two.
    sums = [about.pop(SHA256, None) for about in (embedded, config) if about]
    if embedded is not None and embedded != config:
        raise UserError(
            f"{config_path} and {weights} do not belong together.",
            f"Save the model again, or delete {CONFIG} to use the configuration stored in the weights.",
        )
    state, where = read_state_dict(weights), config_path or weights
    if (expected := next(filter(None, sums), None)) and tensors_sha256(state) != expected:
        raise UserError(
            f"{weights} is damaged: its tensors are not the ones that were saved (their SHA-256 differs).",
            "Copy the file again, or save the model again.",
        )
    if where.name == formats.CONFIG:
        return formats.import_open_clip(state, config, weights, where)
    for marks, reader in formats.PUBLISHED:
        if state.keys() >= marks:
            return reader(state, config, weights)
    remedy = f"Restore the {CONFIG} that was saved with the weights; it is of save_model, PCME++, ProLIP or open_clip."
    with refused(f"{where} describes no model that can be built", remedy):
        about = {key: value for key, value in config.items() if key not in FORMAT}
        formats.check_sizes(about["architecture"], lambda: make(about), state)
        model = make(about)
        create_transforms(model)
    own = {name: x for name, x in state.items() if model.adapter or not name.startswith("adapter.")}
    load_strictly(model, own, weights)
    return model


def read_config(path: Path) -> dict | None:
    """The JSON object in a file, or inside a file of weights; None if these have none. Raises UserError."""
    with refused(f"{path} cannot be read", "It may be damaged or cut short: copy it or save the model again."):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("config")
        else:
            text = path.read_text(encoding="utf-8") if path.suffix == ".json" else None
        return None if text is None else dict(json.loads(text))
