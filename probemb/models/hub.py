"""Saving and loading: folders, single files and Hugging Face hub names.

A saved model is a folder with `model.safetensors` and `config.json`. The configuration is also inside the weights file,
so that each of the two files is replaced as a whole and a model never exists in halves. Both have the SHA-256 of the
tensors, which loading compares; models saved by older versions have none.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probemb.errors import UserError
from probemb.files import replace_file, replace_text
from probemb.models.architectures import check_memory
from probemb.models.digest import loaded, tensors_sha256
from probemb.models.dual_encoder import DEFAULTS, DualEncoder, check_config
from probemb.models.formats import open_clip_folder
from probemb.models.formats.open_clip_folder import OpenClipFiles, find_open_clip, import_open_clip
from probemb.models.formats.published import import_pcmepp, import_prolip, is_pcmepp, is_prolip
from probemb.models.inputs import Transforms, create_tokenizer, create_transforms
from probemb.models.pretrained import HUB_NAME, HUB_PREFIX, is_hub_name, load_strictly, read_state_dict

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED_WEIGHTS = "pytorch_model.bin"  # older hub repositories; read without executing anything
FORMAT = {"format": "probemb", "version": 1}
SHA256 = "tensors_sha256"  # in a saved configuration, beside what describes the model


class LoadedModel(NamedTuple):
    """A model for inference and what prepares its input."""

    model: DualEncoder
    tokenizer: Callable[[list[str]], Tensor]
    transforms: Transforms


def save_model(model: DualEncoder, folder: str | Path, overwrite: bool = False) -> Path:
    """Writes `model.safetensors` and `config.json`; each is written aside, synced to disk and renamed.

    Saving again over the same configuration (a later state of the same run) is fine.

    Returns:
        the folder.

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


def write_model(weights: Path, state: dict[str, Tensor], config: Path, about: dict, embed: bool = False) -> None:
    """Write tensors, and their configuration as JSON; each file is replaced as a whole.

    The configuration also gets the SHA-256 of the tensors.

    Args:
        embed: put the configuration into the weights file too.

    Raises:
        UserError: if they cannot be written.
    """
    about = {**about, SHA256: tensors_sha256(state)}
    metadata = {"config": json.dumps(about)} if embed else None
    try:
        replace_file(weights, lambda path: save_file(state, path, metadata))
        replace_text(config, json.dumps(about, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The model cannot be written to {weights.parent} ({getattr(error, 'strerror', None) or error}).",
            "Choose a folder that you can write to, on a disk with free space.",
        ) from error


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
    loaded[str(path_or_name)] = weakref.ref(model)
    return LoadedModel(model, create_tokenizer(model, weights.parent), create_transforms(model, resize=resize))


def lasting_name(path_or_name: str | Path) -> str:
    """A name for `load_model` that holds in every working directory: a path made absolute, or a hub name as it is."""
    path = Path(path_or_name)
    return str(path.absolute()) if path.exists() else str(path_or_name)


def open_clip_files(source: str) -> OpenClipFiles | None:
    """The files of a folder or of a hub repository in open_clip's layout; None for any other source.

    Raises UserError: there is no model.
    """
    if not Path(source).is_dir() and not (is_hub_name(source) and not Path(source).exists()):
        return None
    weights, config = _locate(source)
    return OpenClipFiles(weights, config) if config and config.name == open_clip_folder.CONFIG else None


def push_to_hub(
    model: DualEncoder,
    repo_id: str,
    private: bool = False,
    commit_message: str = "Upload probabilistic CLIP",
) -> str:
    """Uploads a model to a Hugging Face repository (created if absent), logged in as `hf auth login` left it.

    Returns:
        the address of the commit.

    Raises:
        UserError: if the name is not a repository's, or the upload fails.
    """
    from huggingface_hub import HfApi

    if not HUB_NAME.fullmatch(repo_id):
        raise UserError(f"'{repo_id}' is not a repository name.", "Write it as owner/name.")
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        try:
            api = HfApi()
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)
        except Exception as error:  # the client raises its HTTP library's errors and its own
            raise UserError(
                f"The model could not be uploaded to {repo_id} ({type(error).__name__}).",
                "Check the network, the name, and that `hf auth whoami` knows you.",
            ) from error
    return str(commit)


def _locate(path_or_name: str | Path) -> tuple[Path, Path | None]:
    """The weights file and the configuration file (None if there is none) of a path or a hub name."""
    path = Path(path_or_name)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"There is no model at {str(path)[:200]}: {why}.", "Check the path.") from None
    if path.is_file() and path.name in open_clip_folder.WEIGHTS and find_open_clip(path.parent):
        return path, path.with_name(open_clip_folder.CONFIG)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                f"{path} is not a .safetensors file.", "Give a run folder, a model folder or a .safetensors file."
            )
        config = path.with_name(CONFIG)
        return path, config if config.is_file() else None
    tried = [path / "model" / WEIGHTS, path / WEIGHTS, path / PICKLED_WEIGHTS]
    theirs = find_open_clip(path)
    if theirs and not tried[0].is_file() and not _is_saved_here(path):
        return theirs
    for weights in tried:
        if weights.is_file():
            config = weights.with_name(CONFIG)
            return weights, config if config.is_file() else None
    if path.is_dir():
        raise UserError(
            f"There is no model in {path} (tried {', '.join(map(str, tried))}, and {open_clip_folder.CONFIG} with "
            f"{' or '.join(open_clip_folder.WEIGHTS)}).",
            "Give the folder of a run that has saved its model, or a folder with model.safetensors and config.json.",
        )
    name = str(path_or_name)
    if not is_hub_name(name):
        raise UserError(
            f"There is no model at {path}: the path does not exist.",
            "Give a run folder, a model folder, a .safetensors file, or a hub name (owner/name, or "
            f"{HUB_PREFIX}owner/name where a folder could be meant).",
        )
    return _download(name, tried)


def _is_saved_here(folder: Path) -> bool:
    """True if a folder has a model that open_clip's files beside it do not stand for."""
    if (folder / CONFIG).is_file():
        return _describes_model(read_config(folder / CONFIG))
    return (folder / WEIGHTS).is_file() and _embedded_config(folder / WEIGHTS) is not None


def _describes_model(config: dict) -> bool:
    """True if config.json is this project's or of PCME++ or ProLIP, and not the one of transformers or timm."""
    return config.get("format") == FORMAT["format"] or "vision_cfg" in config


def _download(name: str, tried: list[Path]) -> tuple[Path, Path]:
    name = name.removeprefix(HUB_PREFIX)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = False

    def first(*files: str) -> Path:
        nonlocal unreachable
        for file in files:
            try:
                return Path(hf_hub_download(name, file, local_files_only=unreachable))
            except EntryNotFoundError as error:
                missing = error
                unreachable = isinstance(error, LocalEntryNotFoundError)
        raise missing

    try:
        try:
            config = first(CONFIG)
        except EntryNotFoundError:
            return first(*open_clip_folder.WEIGHTS), first(open_clip_folder.CONFIG)
        if not _describes_model(read_config(config)):
            try:
                theirs = first(open_clip_folder.CONFIG)
            except EntryNotFoundError:
                pass  # config.json is refused below, with its reason
            else:
                return first(*open_clip_folder.WEIGHTS), theirs
        return first(WEIGHTS, PICKLED_WEIGHTS), config
    except UserError:
        raise
    except Exception as error:  # the client raises its HTTP library's errors and its own
        raise UserError(
            f"There is no folder {tried[1].parent}, and the hub's {name} could not be read ({type(error).__name__}; "
            f"tried {', '.join(map(str, tried))}; {CONFIG} and {WEIGHTS}, and {open_clip_folder.CONFIG} on the hub).",
            "Check the path or the hub name, and the network.",
        ) from error


def _build(weights: Path, config_path: Path | None) -> DualEncoder:
    if config_path and config_path.name == open_clip_folder.CONFIG:
        about, state = read_config(config_path), read_state_dict(weights)
        _check_tensors(state, about.get(SHA256), weights)
        return import_open_clip(state, about, weights, config_path)
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
    if is_pcmepp(state):
        return import_pcmepp(state, config, weights)
    if is_prolip(state):
        return import_prolip(state, config, weights)
    if config.get("format") != FORMAT["format"] or config.get("version") != FORMAT["version"]:
        raise UserError(
            f"{config_path or weights} does not describe a model of this project (version {FORMAT['version']}).",
            "Give a model that save_model wrote, or published weights of PCME++ or ProLIP.",
        )
    try:
        check_config(config, state)
        about = {key: value for key, value in config.items() if key not in FORMAT}
        check_memory(lambda: DualEncoder(about), state)
        model = DualEncoder(about)
        create_transforms(model)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"{config_path or weights} describes no model that can be built ({type(error).__name__}: {error}).",
            f"Restore the {CONFIG} that was saved with the weights.",
        ) from error
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
    if config is not None and not isinstance(config, dict):
        raise UserError(f"{weights} has no configuration of a model inside.", "Copy or save it again.")
    return config


def read_config(path: Path) -> dict:
    """The JSON object in a file. Raises UserError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON.", "Restore the file that was saved with the weights.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a model configuration.", "Restore the file that was saved with the weights.")
    return config


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
