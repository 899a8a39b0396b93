"""Models in the layouts of others: the published weights of PCME++ and ProLIP, and open_clip's folders.

A folder in open_clip's layout, as `tools.export` writes and open_clip's hub repositories have it:

    open_clip_config.json           {"model_cfg", "preprocess_cfg"}
    open_clip_model.safetensors     the weights, or
    open_clip_pytorch_model.bin     pickled ones, which are read without executing anything
"""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from open_clip import CLIP
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.models.architectures import SIGLIP, Stock, complete, is_open_clip, obstacle, read_architecture
from probemb.models.architectures import architecture as architecture_of
from probemb.models.dual_encoder import DualEncoder, plain
from probemb.models.heads import GPO_SIZES
from probemb.models.weights import (
    PREPROCESS_KEYS,
    fill_stock,
    find_pretrained,
    load_strictly,
    read_state_dict,
    refused,
    write_model,
)

# ------------------------------------------------------------------------------------------- untrusted configurations


def check_sizes(config: dict, make: Callable[[], nn.Module], state: dict[str, Tensor]) -> None:
    """Raise ValueError for an untrusted architecture that asks for far more than its weights have. Its numbers are
    bounded first, so that `make()` builds it, here without memory, in little time.
    """
    largest = max([10**5, *(n for tensor in state.values() for n in tensor.shape)])
    for part in ("vision_cfg", "text_cfg"):
        for key, value in config[part].items():
            most = len(state) if key in ("layers", "graph_layers", "convolutions") else largest
            for size in value if isinstance(value, list) else [value]:
                if isinstance(size, int | float) and not abs(size) <= most:
                    raise ValueError(f"{part} has {key} {value}")
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        wanted = sum(tensor.numel() for tensor in make().state_dict().values())
    if wanted > 16 * sum(tensor.numel() for tensor in state.values()):
        raise ValueError(f"it has {wanted:,} numbers, far more than the weights")


# ----------------------------------------------------------------------------------------------- PCME++'s and ProLIP's

# What the authors' configuration may say about the towers; they ignore everything else in it.
VISION_KEYS = ("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value")
TEXT_KEYS = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "ls_init_value")
PCMEPP_MARKS = {"visual.uncertainty_proj", "uncertainty_text_projection", "negative_scale", "shift"}
PROLIP_MARKS = {"visual.unc_embedding", "visual.uncertainty_proj.weight", "text.unc_emb", "logit_bias"}
# Beginnings of their names, and of ours; the first one that fits is replaced.
PCMEPP_NAMES = {
    "visual.uncertainty_proj": "visual.log_var_head.weight",
    "uncertainty_text_projection": "text.log_var_head.weight",
    "negative_scale": "scale",
    **{name: name for name in ("visual.", "logit_scale", "shift")},
    "": "text.",
}
PROLIP_NAMES = {
    "visual.uncertainty_proj.": "visual.log_var_head.",
    "text.text_uncertainty_projection.": "text.log_var_head.",
    "": "",
}


def import_pcmepp(state_dict: dict[str, Tensor], config: dict, source: str | Path = "the state dict") -> DualEncoder:
    """A model with the authors' weights; what their `config` ({"embed_dim", "vision_cfg", "text_cfg"}) leaves out is
    read from the shapes. Raises UserError, which names `source`: they do not fit each other.
    """
    with refused(f"{source} is not a complete PCME++ model", "Download both config.json and the weights again."):
        architecture = _architecture(state_dict, config, "", n_prefix=1)
        layers = [_depth(state_dict, f"{tower}uncertainty_transformer") for tower in ("visual.", "")]
        layers = layers[0] if layers[0] == layers[1] else layers
        model = _model("PCMEPP", architecture, n_unc_layers=layers, uncertainty_bias=False)
        state = _renamed(state_dict, PCMEPP_NAMES)
        for tower in ("visual", "text"):
            state[f"{tower}.log_var_head.weight"] = state[f"{tower}.log_var_head.weight"].T
        load_strictly(model, state, source)
    return model


def import_prolip(state_dict: dict[str, Tensor], config: dict, source: str | Path = "the state dict") -> DualEncoder:
    """As `import_pcmepp`, with uncertainty "prolip-code", and the class token behind a text that is not causal.

    [UNC] here is one vector: theirs is an embedding and a row of the position embeddings, which are added.
    """
    with refused(f"{source} is not a complete ProLIP model", "Download both config.json and the weights again."):
        architecture = _architecture(state_dict, config, "text.", n_prefix=2, more=("norm_kwargs", "hf_tokenizer_name"))
        text, length = architecture["text_cfg"], len(state_dict["text.positional_embedding"]) - 2
        text |= {"context_length": length, "embed_cls": True, "no_causal_mask": True, "pool_type": "last"}
        text |= {"proj_bias": "text.text_projection.bias" in state_dict}
        if text["vocab_size"] == SIGLIP["vocab_size"]:
            text |= {"pad_id": SIGLIP["pad_id"], "tokenizer_kwargs": {"clean": "canonicalize"}}
            text.setdefault("hf_tokenizer_name", SIGLIP["name"])
        architecture["init_logit_bias"] = state_dict["logit_bias"].item()
        about = {"objective": "prolip", "match": "cosine", "max_logit_scale": None, "uncertainty": "prolip-code"}
        model = _model("ProLIP", architecture, n_unc_layers=0, uncertainty_bias=True, **about)
        state = _renamed(state_dict, PROLIP_NAMES)
        for tower, token, row in (("visual", "unc_embedding", 1), ("text", "unc_emb", length)):
            positions = state[f"{tower}.positional_embedding"]
            state[f"{tower}.uncertainty_token"] = state.pop(f"{tower}.{token}") + positions[row]
            state[f"{tower}.positional_embedding"] = torch.cat([positions[:row], positions[row + 1 :]])
        load_strictly(model, state, source)
    return model


PUBLISHED = ((PCMEPP_MARKS, import_pcmepp), (PROLIP_MARKS, import_prolip))


def _renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    begins = {key: next(name for name in names if key.startswith(name)) for key in state}
    return {
        names[begins[key]] + key.removeprefix(begins[key]): value.reshape(1) if value.ndim == 0 else value
        for key, value in state.items()
    }


def _model(name: str, architecture: dict, stock: nn.Module | None = None, preprocess: dict | None = None, **more):
    """A DualEncoder of others' weights; images are prepared as for CLIP, but for `preprocess`."""
    config = {"name": name, "head": "clip", "embed_dim": architecture["embed_dim"], "pooling": dict(GPO_SIZES)}
    size = architecture["vision_cfg"].get("image_size", 224)
    preprocess = {**plain(vars(PreprocessCfg(size=size))), **(preprocess or {})}
    return DualEncoder({**config, "architecture": architecture, "preprocess": preprocess, **more}, stock)


def _architecture(
    state: dict[str, Tensor], config: dict, text_prefix: str, n_prefix: int, more: tuple[str, ...] = ()
) -> dict:
    """open_clip's configuration, from the shapes, then from theirs; `n_prefix` tokens are before an image's patches."""
    conv, embedding = state["visual.conv1.weight"], state[f"{text_prefix}token_embedding.weight"]
    patch, width = conv.shape[-1], conv.shape[0]
    grid = round((len(state["visual.positional_embedding"]) - n_prefix) ** 0.5)
    vision = {"layers": _depth(state, "visual.transformer"), "width": width, "patch_size": patch}
    vision |= {"image_size": grid * patch, "head_width": 64}
    text = {"context_length": len(state[f"{text_prefix}positional_embedding"]), "vocab_size": len(embedding)}
    text |= {"width": embedding.shape[1], "heads": max(embedding.shape[1] // 64, 1)}
    text |= {"layers": _depth(state, f"{text_prefix}transformer")}
    for ours, part, keys in ((vision, "vision_cfg", VISION_KEYS), (text, "text_cfg", (*TEXT_KEYS, *more))):
        theirs = config.get(part) or {}
        ours |= {key: theirs[key] for key in keys if theirs.get(key) is not None}
    size, quick_gelu = state["visual.proj"].shape[1], bool(config.get("quick_gelu", False))
    architecture = {"embed_dim": size, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick_gelu}
    check_sizes(architecture, lambda: Stock(architecture), state)
    return architecture


def _depth(state: dict[str, Tensor], transformer: str) -> int:
    pattern = re.compile(re.escape(transformer) + r"\.resblocks\.(\d+)\.")
    return 1 + max((int(match[1]) for match in map(pattern.match, state) if match), default=-1)


# --------------------------------------------------------------------------------------------------- open_clip's folder

WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # the first one is taken
WITHOUT_BIAS = "open_clip_model_without_bias.safetensors"
CONFIG = "open_clip_config.json"
PREPROCESSING = {*vars(PreprocessCfg()), "crop_pct"}  # the last one is ours, and open_clip ignores it
SIZES = {"image_size", "context_length"}  # to which positions are interpolated
# What may differ beside them: tokenizers, origins of weights, and what only training does.
FREE = SIZES | {"hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "pad_id"}
FREE |= {"timm_model_pretrained", "hf_model_pretrained", "patch_dropout", "timm_drop", "timm_drop_path"}


def open_clip_preprocessing(about: dict, source: Path, name: str, architecture: dict) -> dict:
    """The preprocessing that weights in open_clip's layout, of the configuration `about`, require of a model `name`."""
    with refused(f"{source} describes no model that can be built here", "Fetch the folder again."):
        theirs, preprocess = _open_clip_config(about)
        check_architecture(name, architecture, "CLIP", theirs, str(source.parent), FREE)
    return {key: value for key, value in preprocess.items() if key in PREPROCESS_KEYS}


def import_open_clip(state: dict, about: dict, weights: Path, source: Path) -> DualEncoder:
    """A point model with open_clip's weights: `state` of the file `weights`, `about` of the configuration `source`."""
    with refused(f"{source} describes no model that can be built here", "Fetch the folder again."):
        architecture, preprocess = _open_clip_config(about)
        check_sizes(architecture, lambda: Stock(architecture), state)
        return _point_model("CLIP", architecture, state, weights, preprocess)


def named_open_clip(name: str, pretrained: str) -> tuple[DualEncoder, Path]:
    """A point model of an architecture of open_clip's, with the weights of a tag or a file, and their file.

    Raises UserError: an unknown tag, no network, or weights of another architecture.
    """
    config = architecture_of(name)
    weights, preprocess = find_pretrained(name, pretrained, config.get("quick_gelu", False))
    return _point_model(name, plain(config), read_state_dict(weights), weights, preprocess), weights


def _point_model(name: str, architecture: dict, state: dict, weights: Path, preprocess: dict) -> DualEncoder:
    if "logit_bias" in state:
        architecture.setdefault("init_logit_bias", 0.0)
    fill_stock(stock := Stock(architecture), state, weights)
    point = {"probabilistic": False, "n_unc_layers": 0, "max_logit_scale": None, "uncertainty_bias": True}
    match = "distance" if stock.logit_bias is None else "cosine"
    return _model(name, architecture, stock, preprocess, match=match, **point)


def _open_clip_config(about: dict) -> tuple[dict, dict]:
    """The architecture and the preprocessing. Raises ValueError, KeyError, TypeError."""
    config = complete(plain(about["model_cfg"]))
    if not is_open_clip(config) or (why := obstacle(config)):
        raise ValueError(why if is_open_clip(config) else "it is no architecture of open_clip's")
    if config["vision_cfg"].get("timm_model_name"):
        config["vision_cfg"]["timm_model_pretrained"] = False  # the weights are here, and none are fetched
    preprocess = (about.get("preprocess_cfg") or {}).items()
    return config, {key: plain(value) for key, value in preprocess if key in PREPROCESSING and value is not None}


def check_architecture(
    name: str, ours: dict, their_name: str, theirs: dict, where: str, ignored: set[str] = frozenset()
) -> None:
    """Raise UserError where two architectures differ but in `ignored` keys; `where`: the source of theirs."""
    different = []
    for part, defaults in (("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)):
        here, there = (c[part] if "tower" in c[part] else asdict(defaults(**c[part])) for c in (ours, theirs))
        keys = (key for key in {**here, **there} if key not in ignored and here.get(key) != there.get(key))
        different += [f"{part}.{key} {str(there.get(key))[:80]} against {str(here.get(key))[:80]}" for key in keys]
    if bool(ours.get("quick_gelu")) != bool(theirs.get("quick_gelu")):
        different += ["quick_gelu"]
    if different:
        raise UserError(
            f"{where} is a {their_name} and does not fit {name} ({', '.join(different[:4])}).",
            "Name the architecture that it was trained with.",
        )


def export_open_clip(model: DualEncoder, folder: str | Path) -> Path:
    """Write the means' part of a model as a folder that open_clip loads strictly, with equal outputs.

        open_clip.create_model_and_transforms("local-dir:FOLDER")
        open_clip.create_model_and_transforms("ViT-B-16", pretrained="FOLDER/open_clip_model.safetensors")

    The second form, CLIP_benchmark's, refuses a logit bias that open_clip's architecture lacks: for that there is a
    second file, WITHOUT_BIAS. Raises UserError: open_clip has no such model, or the folder cannot be written.
    """
    folder, config, shape = Path(folder), model.config, model.config["architecture"]
    for applies, what in (
        (config["head"] != "clip", f"its head is '{config['head']}'"),
        (not is_open_clip(shape), "open_clip has no such architecture"),
        (config["uncertainty"] != "branch", "its means depend on an uncertainty token, which open_clip's towers lack"),
        (
            model.adapter is not None and model.adapter.moves,
            "its adapter changes the means; those of laplace, loss-order, asymvlm and probvlm leave them as they are",
        ),
    ):
        if applies:
            raise UserError(
                f"The model ({config['name']}) cannot be exported to open_clip: {what}.",
                "Export a model of one of open_clip's architectures with head 'clip' and an uncertainty branch.",
            )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        sizes, plain_names = {name: x.shape for name, x in Stock(shape).state_dict().items()}, None
        if not (shape.get("custom_text") or "multimodal_cfg" in shape or "hf_model_name" in shape["text_cfg"]):
            options = {key: value for key, value in shape.items() if key != "custom_text"}
            plain_names = set(CLIP(**options).state_dict())  # which has its text tower's parameters at the top
    held = model.state_dict()
    if resized := [name for name, size in sizes.items() if held[name].shape != size]:
        raise UserError(
            f"The model ({config['name']}) cannot be exported to open_clip: {resized[0]} is of {model.image_size} "
            "pixels, and open_clip builds this backbone of timm's for another size only.",
            "Finish it at the architecture's own image_size, and export that.",
        )
    state = {name: held[name].detach().cpu().contiguous() for name in sizes}
    state |= {name: state[name].reshape(()) for name in ("logit_scale", "logit_bias") if name in state}
    renamed = {name.removeprefix("text."): x for name, x in state.items()}
    if set(renamed) == plain_names:
        state = renamed  # `CustomTextCLIP` reads these names too
    else:
        shape = {**shape, "custom_text": True}
    preprocess = {key: value for key, value in config["preprocess"].items() if key in PREPROCESSING}
    about = {"model_cfg": shape, "preprocess_cfg": preprocess}
    named = read_architecture(config["name"])  # None of a model that open_clip has no name for
    if "logit_bias" in state and named and named.get("init_logit_bias") is None:
        bare = {name: x for name, x in state.items() if name != "logit_bias"}
        write_model(folder / WITHOUT_BIAS, bare, folder / CONFIG, about)
    write_model(folder / WEIGHTS[0], state, folder / CONFIG, about)  # last: the configuration has its digest
    return folder
