"""Saving and loading: folders, single files and Hugging Face hub names.

A saved model is a folder with `model.safetensors` and `config.json`. The configuration is also inside the weights file,
so that each of the two files is replaced as a whole and a model never exists in halves. Both have the SHA-256 of the
tensors, which loading compares; models saved by older versions have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from probemb.errors import UserError
from probemb.models import formats
from probemb.models.dual_encoder import DualEncoder
from probemb.models.formats import ModelFiles, check_memory, check_sizes, find_open_clip, published_reader, refused
from probemb.models.inputs import Transforms, create_tokenizer, create_transforms
from probemb.models.weights import SHA256, digest_tensors, load_strictly, read_state_dict, tensors_sha256, write_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED_WEIGHTS = "pytorch_model.bin"  # older hub repositories; read without executing anything
FORMAT = {"format": "probemb", "version": 1}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PREFIX = "hf-hub:"  # open_clip's: looks nowhere else
# First parts of paths, not of repositories: a missing runs/x is not looked for on the hub.
LOCAL_FOLDERS = {"checkpoints", "data", "model", "models", "out", "output", "outputs", "results", "runs", "weights"}
_loaded: dict[str, weakref.ref] = {}  # the models that this process has loaded, by name, for the reports that it writes


class LoadedModel(NamedTuple):
    """A model for inference and what prepares its input."""

    model: DualEncoder
    tokenizer: Callable[[list[str]], Tensor]
    transforms: Transforms


# --------------------------------------------------------------------------------------------------------------- saving


def save_model(model: DualEncoder, folder: str | Path) -> Path:
    """Write `model.safetensors` and `config.json`; each is written under a temporary name, synced to disk and renamed.

    Raises UserError: they cannot be written.
    """
    folder = Path(folder)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_model(folder / WEIGHTS, state, folder / CONFIG, {**FORMAT, **model.config}, embed=True)
    return folder


# -------------------------------------------------------------------------------------------------------------- loading


def load_model(path_or_name: str | Path, device: str | torch.device = "cpu", resize: str = "pil") -> LoadedModel:
    """Load a model for inference: `model, tokenizer, transforms = load_model("runs/x")`.

    It is in evaluation mode and its parameters need no gradient, so that no call has to be wrapped in `no_grad`; to
    train it, `model.train().requires_grad_()`.

    Args:
        path_or_name: a run folder (its `model/` is read), a model folder, a .safetensors file, or a Hugging Face hub
            name such as "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps" (with "hf-hub:" in front of it, no folder is
            looked at). Published weights of PCME++ and ProLIP are recognised, and so are folders and repositories in
            open_clip's layout, which become point models. Tokenizer files beside the weights win over the hub's.
        resize: backend for resizing images, see `create_transforms`.

    Raises:
        UserError: nothing is found, or the weights are not this project's or do not fit their configuration.
    """
    weights, config = _locate(path_or_name)
    model = build_saved(weights, config).to(device).eval().requires_grad_(False)
    _loaded[str(path_or_name)] = weakref.ref(model)
    return LoadedModel(model, create_tokenizer(model, weights.parent), create_transforms(model, resize=resize))


def lasting_name(path_or_name: str | Path) -> str:
    """A name for `load_model` that holds in every working directory: a path made absolute, or a hub name as it is."""
    path = Path(path_or_name)
    return str(path.absolute()) if path.exists() else str(path_or_name)


def is_hub_name(source: str) -> bool:
    """True if a source is looked up on the hub: hf-hub:owner/name, or owner/name that does not look like a path."""
    local = source.partition("/")[0].lower() in LOCAL_FOLDERS or Path(source).parent.is_dir()
    local = local or source.endswith((".safetensors", ".pt"))
    return bool(HUB_NAME.fullmatch(source.removeprefix(HUB_PREFIX))) and (source.startswith(HUB_PREFIX) or not local)


def saved_files(source: str) -> ModelFiles | None:
    """The files of a saved model, ours or in open_clip's layout: a folder, weights with their configuration inside, or
    a hub name. None for an open_clip tag, or a file of weights alone.
    """
    path = Path(source)
    if path.is_file():
        return _locate(source) if path.suffix == ".safetensors" and _embedded_config(path) is not None else None
    return _locate(source) if path.is_dir() or is_hub_name(str(source)) else None


def _locate(path_or_name: str | Path) -> ModelFiles:
    path, name = Path(path_or_name), str(path_or_name)
    why = "the path does not exist"
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if is_hub_name(name):
            return _download(name.removeprefix(HUB_PREFIX))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
    else:
        if path.name in formats.WEIGHTS and find_open_clip(path.parent):
            return ModelFiles(path, path.with_name(formats.CONFIG))
        candidates = [path / "model" / WEIGHTS, path / WEIGHTS, path / PICKLED_WEIGHTS] if path.is_dir() else [path]
        theirs = find_open_clip(path)
        if theirs and not candidates[0].is_file() and not _is_saved_here(path):
            return theirs
        for weights in candidates:
            if weights.is_file() and (path.is_dir() or path.suffix == ".safetensors"):
                config = weights.with_name(CONFIG)
                return ModelFiles(weights, config if config.is_file() else None)
        why = f"tried {', '.join(map(str, candidates))}, and {formats.CONFIG} with {' or '.join(formats.WEIGHTS)}"
    raise UserError(
        f"There is no model at {name[:200]} ({why}).",
        "Give a run that has saved its model, a folder with model.safetensors and config.json, a .safetensors file, or "
        f"a hub name (owner/name, or {HUB_PREFIX}owner/name where a folder could be meant).",
    )


def _is_saved_here(folder: Path) -> bool:
    """True if a folder has a model that open_clip's files beside it do not stand for."""
    if (folder / CONFIG).is_file():
        return _describes_model(read_config(folder / CONFIG))
    return (folder / WEIGHTS).is_file() and _embedded_config(folder / WEIGHTS) is not None


def _describes_model(config: dict) -> bool:
    """True if config.json is this project's or of PCME++ or ProLIP, and not the one of transformers or timm."""
    return config.get("format") == FORMAT["format"] or "vision_cfg" in config


def _download(name: str) -> ModelFiles:
    """The files of a hub repository, or of its cached copy without network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = False

    def first(*files: str) -> Path | None:
        nonlocal unreachable
        for file in files:
            try:
                return Path(hf_hub_download(name, file, local_files_only=unreachable))
            except EntryNotFoundError as error:
                unreachable = isinstance(error, LocalEntryNotFoundError)
        return None

    try:
        config, names = first(CONFIG), (WEIGHTS, PICKLED_WEIGHTS)
        other_library = config is None or not _describes_model(read_config(config))
        if other_library and (theirs := first(formats.CONFIG)):
            config, names = theirs, formats.WEIGHTS
        weights = config and first(*names)
        why = "no network, or no such files" if unreachable else "no such files"
    except UserError:
        raise
    except Exception as error:  # the client raises its HTTP library's errors and its own
        weights, why = None, type(error).__name__
    if not weights:
        raise UserError(
            f"There is no folder {name}, and the hub's {name} could not be read ({why}; tried {CONFIG} with {WEIGHTS}, "
            f"and {formats.CONFIG}).",
            "Check the path or the hub name, and the network.",
        )
    return ModelFiles(weights, config)


def build_saved(weights: Path, config_path: Path | None) -> DualEncoder:
    """The model of two files. Raises UserError: they do not fit each other, or the weights are damaged."""
    if config_path and config_path.name == formats.CONFIG:
        about, state = read_config(config_path), read_state_dict(weights)
        _check_tensors(state, about.get(SHA256), weights)
        return formats.import_open_clip(state, about, weights, config_path)
    embedded = _embedded_config(weights)
    config = read_config(config_path) if config_path else embedded
    if config is None:
        raise UserError(
            f"{weights} has no configuration.", f"Put the {CONFIG} that was saved with it into the same folder."
        )
    # The one inside is written with the tensors; config.json may be of the state before, after a crash between the two.
    sums = [about.pop(SHA256, None) for about in (embedded, config) if about]
    if embedded is not None and embedded != config:
        raise UserError(
            f"{config_path} and {weights} do not belong together.",
            f"Save the model again, or delete {CONFIG} to use the configuration stored in the weights.",
        )
    state = read_state_dict(weights)
    if reader := published_reader(state):
        return reader(state, config, weights)
    where = config_path or weights
    if not FORMAT.items() <= config.items():
        raise UserError(
            f"{where} does not describe a model of this project (version {FORMAT['version']}).",
            "Give a model that save_model wrote, or published weights of PCME++ or ProLIP.",
        )
    remedy = f"Restore the {CONFIG} that was saved with the weights."
    with refused(f"{where} describes no model that can be built", remedy):
        check_sizes(config["architecture"], state)
        about = {key: value for key, value in config.items() if key not in FORMAT}
        check_memory(lambda: DualEncoder(about), state)
        model = DualEncoder(about)
        create_transforms(model)
    load_strictly(model, state, weights)
    _check_tensors(state, next(filter(None, sums), None), weights)
    return model


def _check_tensors(state: dict[str, Tensor], expected: str | None, weights: Path) -> None:
    if expected is not None and tensors_sha256(state) != expected:
        raise UserError(
            f"{weights} is damaged: its tensors are not the ones that were saved (their SHA-256 differs).",
            "Copy the file again, or save the model again.",
        )


def _embedded_config(weights: Path) -> dict | None:
    """The configuration inside a weights file, if it has one."""
    if weights.suffix != ".safetensors":
        return None
    try:
        with safe_open(weights, framework="pt") as file:
            text = (file.metadata() or {}).get("config")
        return None if text is None else _object(text)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{weights} is not a readable safetensors file.", "The file may be cut short: copy or save it again."
        ) from error


def read_config(path: Path) -> dict:
    """The JSON object in a file. Raises UserError."""
    try:
        return _object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not the configuration of a model.", "Restore the file that was saved with the weights."
        ) from error


def _object(text: str) -> dict:
    if not isinstance(config := json.loads(text), dict):
        raise ValueError("no JSON object")
    return config


# -------------------------------------------------------------------------------------------------------------- digests


def digest_model(digest, model: torch.nn.Module) -> None:
    """Feed a hash with everything that a model's embeddings depend on: its configuration and its weights."""
    digest.update(json.dumps(model.config, sort_keys=True, default=str).encode())
    digest_tensors(digest, model.state_dict())


def weights_sha256(model: torch.nn.Module) -> str:
    """Identify a model, wherever its files lie: 64 hexadecimal digits over `digest_model`."""
    digest = hashlib.sha256()
    digest_model(digest, model)
    return digest.hexdigest()


_sha256_of = lru_cache(maxsize=8)(lambda model: weights_sha256(model()))


def loaded_weights() -> dict[str, str]:
    """`weights_sha256` of each loaded model that is still in use."""
    return {name: _sha256_of(model) for name, model in _loaded.items() if model() is not None}
