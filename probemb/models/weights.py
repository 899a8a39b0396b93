"""Files of weights: written as a whole, read without executing anything, loaded strictly; open_clip's weights."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import open_clip
import torch
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from probemb.errors import UserError, nearest
from probemb.files import replace_file, replace_text

PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode")
CAPTIONING = "text_decoder."  # CoCa's third part, which embeds nothing
SHA256 = "tensors_sha256"  # in a saved configuration, beside what describes the model


@contextmanager
def refused(what: str, remedy: str) -> Iterator[None]:
    """UserError for whatever other people's code raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"{what} ({type(error).__name__}: {why}).", remedy) from error


def tensors_sha256(state: dict[str, Tensor], about: str = "") -> str:
    """64 hexadecimal digits over `about` and the tensors, sorted by name."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(state.items()):
        digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_model(weights: Path, state: dict[str, Tensor], config: Path, about: dict, embed: bool = False) -> None:
    """Write tensors, and their configuration as JSON with the tensors' SHA-256, with `embed` into the weights too."""
    about = {**about, SHA256: tensors_sha256(state)}
    metadata = {"config": json.dumps(about)} if embed else None
    remedy = "Choose a folder that you can write to, on a disk with free space."
    with refused(f"The model cannot be written to {weights.parent}", remedy):
        replace_file(weights, lambda path: save_file(state, path, metadata))
        replace_text(config, json.dumps(about, indent=2) + "\n")


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or pickled file (nothing is executed), without the wrapping of open_clip's trainer."""
    path = Path(path)
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        state = state.get("state_dict", state)
        if not state or not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("no dictionary of tensors")
    except Exception as error:  # of many kinds; torch's messages are not shown: they advise to execute what is inside
        raise UserError(
            f"{path} cannot be read as model weights ({type(error).__name__}).",
            "Give an undamaged .safetensors file, or a .pt file of weights, such as open_clip's trainer saves.",
        ) from error
    prefix = "module." if all(key.startswith("module.") for key in state) else ""
    return {key.removeprefix(prefix): value for key, value in state.items()}


def load_strictly(model: nn.Module, state: dict[str, Tensor], source: str | Path) -> None:
    """`load_state_dict`. Raises UserError: tensors are NaN, Inf, no floats, missing, surplus or of another shape."""
    floats = {key for key, value in model.state_dict().items() if value.is_floating_point()}
    if broken := [k for k, x in state.items() if not x.isfinite().all() or (k in floats and not x.is_floating_point())]:
        raise UserError(
            f"{source} holds weights that are NaN or Inf or no floats ({len(broken)} tensors, such as {broken[0]}).",
            "Name an earlier checkpoint, or train again with a lower learning rate.",
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = " ".join(str(error).split()[6:])  # behind "Error(s) in loading state_dict for …:"
        raise UserError(
            f"{source} holds the weights of another model ({why[:300]}{'…' * (len(why) > 300)}).",
            "Name the architecture they were trained with; of a model trained here, also its head and n_unc_layers.",
        ) from error


# ---------------------------------------------------------------------------------------------------- open_clip's


def find_pretrained(name: str, source: str, quick_gelu: bool) -> tuple[Path, dict]:
    """The weights file of an open_clip tag of `name`, or of a path, and a part of the PreprocessCfg: a tag's, or of a
    path what all tags of `name` agree on.
    """
    if Path(source).is_file():
        tags = open_clip.list_pretrained_tags_by_model(name)
        cfgs = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
        asked = [{key: cfg[key] for key in PREPROCESS_KEYS if cfg.get(key)} for cfg in cfgs]
        return Path(source), asked[0] if asked and all(one == asked[0] for one in asked) else {}
    tag = open_clip.get_pretrained_cfg(name, source)
    if not tag:
        tags = open_clip.list_pretrained_tags_by_model(name)
        raise UserError(
            f"'{source}' is neither a file nor a weight tag of {name}.{nearest(source, tags)}",
            f"Give the path of open_clip weights{', or one of: ' if tags else ''}{', '.join(tags)}.",
        )
    if bool(tag.get("quick_gelu", False)) != quick_gelu:
        twin = name.removesuffix("-quickgelu") if quick_gelu else f"{name}-quickgelu"
        raise UserError(
            f"The weights '{source}' were trained with another activation than {name} has.",
            f"Name the model {twin} to use them.",
        )
    remedy = "Check the network, or download them elsewhere and name the file in place of the tag."
    with refused(f"The weights '{source}' of {name} could not be downloaded", remedy):
        path = open_clip.download_pretrained(tag)
    return Path(path), {key: tag[key] for key in PREPROCESS_KEYS if tag.get(key)}


def fill_stock(stock: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load open_clip's weights, in either of its layouts; see `resize_positions`."""
    if "positional_embedding" in state:  # the layout without a text tower of its own
        state = convert_to_custom_text_state_dict(state)
    state = {key: value for key, value in state.items() if not key.startswith(CAPTIONING)}
    for scalar in {"logit_scale", "logit_bias"} & state.keys():
        state[scalar] = state[scalar].reshape(-1)
    with suppress(AttributeError, AssertionError, RuntimeError, IndexError):  # another model's, which is named below
        resize_positions(state, stock)
    load_strictly(stock, state, path)


def resize_positions(state: dict[str, Tensor], model: nn.Module) -> None:
    """Interpolate the position embeddings of open_clip's towers in `state`, in place, to a model's sizes, as open_clip
    does: bicubic with antialiasing on an image's grid, linear along a text. Class tokens keep theirs.
    """
    resize_pos_embed(state, model)
    image, text, pool = (f"{x}.positional_embedding" for x in ("visual", "text", "visual.attnpool"))
    if pool in state and (own := getattr(model.visual, "attnpool", None)):  # a ResNet's, which open_clip leaves alone
        renamed, grid = {image: state[pool]}, math.isqrt(len(own.positional_embedding) - 1)
        resize_pos_embed(renamed, SimpleNamespace(visual=SimpleNamespace(grid_size=grid)))
        state[pool] = renamed[image]
    if text in state:
        own, n = model.text.positional_embedding, int(model.text.cls_emb is not None)  # class tokens, behind the words
        words, last = state[text].split([len(state[text]) - n, n])
        fitted = {text: words}
        resize_text_pos_embed(fitted, SimpleNamespace(text=SimpleNamespace(positional_embedding=own[: len(own) - n])))
        state[text] = torch.cat([fitted[text], last])
