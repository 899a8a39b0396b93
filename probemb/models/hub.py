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
import tempfile
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
from probemb.models.options import DEFAULTS
from probemb.models.weights import SHA256, digest_tensors, load_strictly, read_state_dict, tensors_sha256, write_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED_WEIGHTS = "pytorch_model.bin"  # older hub repositories; read without executing anything
FORMAT = {"format": "probemb", "version": 1}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PREFIX = "hf-hub:"  # open_clip's: looks nowhere else
# First parts of paths that people keep models under: runs/x that is missing is a wrong path, not a hub's repository.
LOCAL_FOLDERS = {
    *("checkpoint", "checkpoints", "data", "demo", "exp", "experiments", "export", "exports", "indexes", "embeddings"),
    *("logs", "model", "models", "out", "output", "outputs", "results", "run", "runs", "tmp", "weights"),
}
_loaded: dict[str, weakref.ref] = {}  # the models that this process has loaded, by name, for the reports that it writes


class LoadedModel(NamedTuple):
    """A model for inference and what prepares its input."""

    model: DualEncoder
    tokenizer: Callable[[list[str]], Tensor]
    transforms: Transforms


# --------------------------------------------------------------------------------------------------------------- saving


def save_model(model: DualEncoder, folder: str | Path, overwrite: bool = False) -> Path:
    """Writes `model.safetensors` and `config.json`; each is written aside, synced to disk and renamed.

    Saving again over the same configuration (a later state of the same run) is fine.

    Raises:
        UserError: if the folder holds a model of another configuration and `overwrite` is not set, or if it cannot be
            written.
    """
    folder = Path(folder)
    config = {**FORMAT, **model.config}
    if not overwrite and _holds_another(folder, config):
        raise UserError(
            f"{folder} already holds another model.", "Choose another folder, or pass overwrite=True to replace it."
        )
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_model(folder / WEIGHTS, state, folder / CONFIG, config, embed=True)
    return folder


def _holds_another(folder: Path, config: dict) -> bool:
    """True if a folder holds any model that is not of this configuration."""
    if (folder / CONFIG).exists():
        held = read_config(folder / CONFIG)
    elif (folder / WEIGHTS).exists():
        held = _embedded_config(folder / WEIGHTS) or {}
    else:
        return False
    held.pop(SHA256, None)
    return {**DEFAULTS, **held} != config


def push_to_hub(
    model: DualEncoder, repo_id: str, private: bool = False, commit_message: str = "Upload probabilistic CLIP"
) -> str:
    """Upload a model to a Hugging Face repository (created if absent), logged in as `hf auth login` left it.

    Returns the address of the commit. Raises UserError: the name is not a repository's, or the upload fails.
    """
    from huggingface_hub import HfApi

    if not HUB_NAME.fullmatch(repo_id):
        raise UserError(f"'{repo_id}' is not a repository name.", "Write it as owner/name.")
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        try:
            api = HfApi()
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))
        except Exception as error:  # the client raises its HTTP library's errors and its own
            raise UserError(
                f"The model could not be uploaded to {repo_id} ({type(error).__name__}).",
                "Check the network, the name, and that `hf auth whoami` knows you.",
            ) from error


# -------------------------------------------------------------------------------------------------------------- loading


def load_model(path_or_name: str | Path, device: str | torch.device = "cpu", resize: str = "pil") -> LoadedModel:
    """Load a model for inference: `model, tokenizer, transforms = load_model("runs/x")`.

    It is in evaluation mode and its parameters need no gradient, so that no call has to be wrapped in `no_grad`; to
    train it, `model.train().requires_grad_()`.

    Args:
        path_or_name: a run folder (its `model/` is read), a model folder, a .safetensors file, or a Hugging Face hub
            name such as "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps" (with "hf-hub:" in front of it, no folder is
            looked at). Published weights of PCME++ and ProLIP are recognised, and so are folders and repositories in
            open_clip's layout, which become point models. A tokenizer's files beside the weights are read instead of
            the hub's.
        device: where to put the weights.
        resize: backend for resizing images, "pil" (as open_clip) or "tensor", see `create_transforms`.

    Raises:
        UserError: if nothing is found (with the places that were tried), or the weights are not this project's or do
            not fit their configuration.
    """
    weights, config = _locate(path_or_name)
    model = _build(weights, config).to(device).eval().requires_grad_(False)
    _loaded[str(path_or_name)] = weakref.ref(model)
    return LoadedModel(model, create_tokenizer(model, weights.parent), create_transforms(model, resize=resize))


def lasting_name(path_or_name: str | Path) -> str:
    """A name for `load_model` that holds in every working directory: a path made absolute, or a hub name as it is."""
    path = Path(path_or_name)
    return str(path.absolute()) if path.exists() else str(path_or_name)


def is_hub_name(source: str) -> bool:
    """True if a source is looked up on the hub: hf-hub:owner/name, or owner/name that does not look like a local path.

    A path is local if its first folder is here, or is called as people call folders of models (runs/x).
    """
    if source.startswith(HUB_PREFIX):
        return bool(HUB_NAME.fullmatch(source.removeprefix(HUB_PREFIX)))
    owner = source.partition("/")[0]
    local = owner.lower() in LOCAL_FOLDERS or Path(source).parent.is_dir() or source.endswith((".safetensors", ".pt"))
    return bool(HUB_NAME.fullmatch(source)) and not local


def is_saved_model(source: str) -> bool:
    """True if `load_model` should read a source: a folder, weights with their configuration inside, or a hub name."""
    path = Path(source)
    if path.is_file():
        try:
            return _embedded_config(path) is not None
        except UserError:
            return False
    return path.is_dir() or is_hub_name(str(source))


def open_clip_files(source: str) -> ModelFiles | None:
    """The files of a folder or of a hub repository in open_clip's layout; None for any other source.

    Raises UserError: there is no model.
    """
    if not Path(source).is_dir() and (Path(source).exists() or not is_hub_name(str(source))):
        return None
    files = _locate(source)
    return files if files.config and files.config.name == formats.CONFIG else None


def _locate(path_or_name: str | Path) -> ModelFiles:
    """The files of a path or a hub name."""
    path, name = Path(path_or_name), str(path_or_name)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"There is no model at {str(path)[:200]}: {why}.", "Check the path.") from None
    if path.is_file() and path.name in formats.WEIGHTS and find_open_clip(path.parent):
        return ModelFiles(path, path.with_name(formats.CONFIG))
    if path.is_file() and path.suffix == ".safetensors":
        return _beside(path)
    if path.is_dir():
        tried = [path / "model" / WEIGHTS, path / WEIGHTS, path / PICKLED_WEIGHTS]
        theirs = find_open_clip(path)
        if theirs and not tried[0].is_file() and not _is_saved_here(path):
            return theirs
        for weights in filter(Path.is_file, tried):
            return _beside(weights)
        raise UserError(
            f"There is no model in {path} (tried {', '.join(map(str, tried))}, and {formats.CONFIG} with "
            f"{' or '.join(formats.WEIGHTS)}).",
            "Give the folder of a run that has saved its model, or a folder with model.safetensors and config.json.",
        )
    if path.exists() or not is_hub_name(name):
        why = "it is not a .safetensors file" if path.exists() else "the path does not exist"
        raise UserError(
            f"There is no model at {path}: {why}.",
            "Give a run folder, a model folder, a .safetensors file, or a hub name (owner/name, or "
            f"{HUB_PREFIX}owner/name where a folder could be meant).",
        )
    return _download(name.removeprefix(HUB_PREFIX))


def _beside(weights: Path) -> ModelFiles:
    config = weights.with_name(CONFIG)
    return ModelFiles(weights, config if config.is_file() else None)


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
        config = first(CONFIG)
        if config is None or not _describes_model(read_config(config)):
            theirs = first(formats.CONFIG)
            config, wanted = (theirs, formats.WEIGHTS) if theirs else (config, (WEIGHTS, PICKLED_WEIGHTS))
        else:
            wanted = WEIGHTS, PICKLED_WEIGHTS
        weights = config and first(*wanted)
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


def _build(weights: Path, config_path: Path | None) -> DualEncoder:
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
        config = None if text is None else json.loads(text)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{weights} is not a readable safetensors file.", "The file may be cut short: copy or save it again."
        ) from error
    return _checked(config, weights) if config is not None else None


def read_config(path: Path) -> dict:
    """The JSON object in a file. Raises UserError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON.", "Restore the file that was saved with the weights.") from error
    return _checked(config, path)


def _checked(config: object, path: Path) -> dict:
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a model configuration.", "Restore the file that was saved with the weights.")
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


def loaded_weights() -> dict[str, str]:
    """`weights_sha256` of each loaded model that is still in use."""
    return {name: _sha256_of(model) for name, model in _loaded.items() if model() is not None}


@lru_cache(maxsize=8)
def _sha256_of(model: weakref.ref) -> str:
    return weights_sha256(model())
