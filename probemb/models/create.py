"""A model from a name, random or from pretrained weights.

model = create_model("ViT-B-16", n_unc_layers=2)        # CLIP's own pooling, D = 512, as in pretraining
model = create_model("ViT-B-32-quickgelu", head="gpo", pretrained="openai", init_scale=5, init_shift=5)  # COCO
model = create_model("ViT-B-16", head="gpo", pretrained="runs/x")              # from a run of `pretrain`
image = model.encode_image(pixels)                      # Gaussian, (B, D)
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from open_clip.transform import PreprocessCfg

from probemb.data.words import count_words, find_vocabulary, frequent_words, read_vectors, read_vocabulary
from probemb.errors import UserError
from probemb.models.architectures import (
    Stock,
    architecture,
    read_architecture,
    reads_regions,
    reads_words,
    stock_text_tower,
    tower_kind,
)
from probemb.models.dual_encoder import DualEncoder, plain
from probemb.models.formats import CONFIG as OPEN_CLIP_CONFIG
from probemb.models.formats import SIZES, check_architecture, open_clip_preprocessing
from probemb.models.heads import GPO_SIZES
from probemb.models.hub import ModelFiles, build_saved, read_config, saved_files
from probemb.models.options import SAVED, ModelOptions
from probemb.models.towers.trunks import fit_image_size, pretrained_trunk
from probemb.models.towers.words import FIRST_WORD
from probemb.models.weights import fill_stock, find_pretrained, load_strictly, read_state_dict, resize_positions

GPO_EMBED_DIM = 1024  # PCME++ §B.2
LOGIT_BIAS = -10.0  # SigLIP's

logger = logging.getLogger(__name__)


def create_model(name: str, **options) -> DualEncoder:
    """A PCME++ model on the CPU in float32 and training mode, random or from the weights of a CLIP or of a run.

    `name` is one of open_clip's models or of the project's (`configs`), `options` are those of `ModelOptions`. Weights
    of open_clip (a tag, a file, or a folder or hub repository in its layout) fill the trunk and the mean branch; the
    uncertainty branch starts from random weights (PCME++ §3.3). With an uncertainty token, a new model's text tower is
    ProLIP's: not causal, with a class token. Raises UserError: an unknown name or tag, or weights of another model.
    """
    o = ModelOptions(name, **options)
    config, source = architecture(name), None
    files = saved_files(o.pretrained) if o.pretrained else None
    if files and (files.config is None or files.config.name != OPEN_CLIP_CONFIG):
        with torch.random.fork_rng(devices=[]):  # the random parts of the new model do not depend on where it starts
            source = build_saved(*files)
    _set_sizes(config, o, source)
    text, theirs = config["text_cfg"], source.config["architecture"]["text_cfg"] if source else {}
    if o.uncertainty != "branch" and (not o.pretrained or (theirs.get("embed_cls") and theirs.get("no_causal_mask"))):
        text |= {"embed_cls": True, "no_causal_mask": True}
    if o.head == "clip" and o.embed_dim is not None:
        config["embed_dim"] = o.embed_dim
        if not text.get("projection", True):  # the states of a GRU in one direction are the embedding
            text["hidden"] = o.embed_dim
    if o.text_weights:
        path = Path(o.text_weights)
        text |= dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), str(path.absolute() if path.is_dir() else path))
    elif "hf_model_name" in text:  # of the same model elsewhere, such as in a folder
        text |= {key: theirs[key] for key in ("hf_model_name", "hf_tokenizer_name") if key in theirs}
    if (given := o.vocabulary) is not None:
        if not reads_words(config):
            raise UserError(f"{name} reads no whole words, so a vocabulary has no use.", "Leave vocabulary out.")
        text["vocabulary"] = read_vocabulary(given) if isinstance(given, str | Path) else list(given)
    elif "vocabulary" in theirs:
        text["vocabulary"] = theirs["vocabulary"]
    if o.match == "cosine":
        config.setdefault("init_logit_bias", LOGIT_BIAS)  # so that open_clip builds it with a bias too
    stock, preprocess = _starting_point(config, o, source, files)
    pooling = o.pooling if o.pooling is not None else {} if o.head in ("pie", "mlp") else dict(GPO_SIZES)
    own_dim = GPO_EMBED_DIM if o.head in ("gpo", "pie") else config["embed_dim"]
    model = DualEncoder(
        {
            "name": Path(name).stem if name.endswith(".json") else name,
            **{key: plain(getattr(o, key)) for key in SAVED},
            "embed_dim": o.embed_dim or own_dim,
            "n_unc_layers": plain(o.layers[0] if o.n_unc_layers is None else o.n_unc_layers),
            "pooling": pooling,
            "architecture": plain(config),
            "preprocess": preprocess if o.crop_pct is None else {**preprocess, "crop_pct": o.crop_pct},
        },
        stock,
    )
    if source is not None:
        fill_from_model(model, source, str(o.pretrained))
    _start_scalars(model, o, source)
    for tower, pretrained in ((model.visual, o.pretrained or o.image_weights), (model.text, o.pretrained)):
        if o.batch_norm == "batch" or (o.batch_norm == "auto" and not pretrained):
            tower.use_batch_statistics()
    model.set_grad_checkpointing(o.grad_checkpointing)
    return model


def _set_sizes(config: dict, o: ModelOptions, source: DualEncoder | None) -> None:
    """Set the image size and the context length to the given ones, or else those of the model to start from."""
    if o.image_size is not None and reads_regions(config):
        raise UserError(f"{o.name} reads precomputed regions, which have no image size.", "Leave image_size out.")
    for part, key in (("vision_cfg", "image_size"), ("text_cfg", "context_length")):
        size = getattr(o, key) or (source and source.config["architecture"][part].get(key))
        config[part] |= {key: size} if size else {}
    patches = tower_kind(config, "vision_cfg") == "open_clip.transformer"
    patch, size = config["vision_cfg"].get("patch_size", 16) if patches else 1, o.image_size or 0
    if size % patch:
        what = f"image_size is {size}, and {o.name} cuts images into patches of {patch} pixels."
        lower = size // patch * patch
        raise UserError(what, f"Set it to {f'{lower} or ' if lower else ''}{lower + patch}.")


@torch.no_grad()
def _start_scalars(model: DualEncoder, o: ModelOptions, source: DualEncoder | None) -> None:
    if o.init_logit_scale is not None:
        model.logit_scale.fill_(math.log(o.init_logit_scale))
    if o.match == "cosine":
        if o.init_logit_bias is not None:
            model.logit_bias.fill_(o.init_logit_bias)
        return
    form = "samples" if o.match == "samples" else "csd"  # a and b of another form are of another unit
    own = source.match_model.numbers if source is not None and source.match_model.form == form else (5.0, 5.0)
    for scalar, start, given in zip((model.scale, model.shift), (o.init_scale, o.init_shift), own):
        scalar.fill_(given if start is None else start)


def _starting_point(
    config: dict, o: ModelOptions, source: DualEncoder | None, files: ModelFiles | None
) -> tuple[Stock, dict]:
    """The deterministic model that the new one takes over, and the preprocessing that belongs to its weights."""
    for option, part, kind, tower, such in (
        ("image_weights", "vision_cfg", "timm", "an image tower from timm", "resnet-gru"),
        ("text_weights", "text_cfg", "open_clip.hf", "a text tower from Hugging Face", "effnet-lite0-minilm"),
    ):
        if getattr(o, option) and (tower_kind(config, part) != kind or source is not None):
            remedy = f"Set {option} to null, or name an architecture such as {such} without pretrained."
            raise UserError(f"{option} are for a new model with {tower}.", remedy)
    weights, wanted = None, {}
    if source is None and files is not None:
        weights = files.weights
        wanted = open_clip_preprocessing(read_config(files.config), files.config, o.name, config)
    elif source is None and o.pretrained:
        weights, wanted = find_pretrained(o.name, o.pretrained, config.get("quick_gelu", False))
    stock = Stock(config)
    if weights:
        fill_stock(stock, read_state_dict(weights), weights)
    if o.image_weights:
        stock.visual, wanted = pretrained_trunk(config["vision_cfg"], o.image_weights)
    if o.text_weights:
        stock.text = stock_text_tower(config, pretrained=True)
        if isinstance(stock.text.proj, torch.nn.Linear) and len(set(stock.text.proj.weight.shape)) == 1:
            torch.nn.init.eye_(stock.text.proj.weight)  # so that a frozen text tower keeps its own embeddings
    size = {"size": config["vision_cfg"].get("image_size", 224)}
    if source is not None:
        return stock, source.config["preprocess"] | size
    return stock, plain({**vars(PreprocessCfg(**size)), **wanted})


def fill_from_model(model: DualEncoder, source: DualEncoder, where: str) -> None:
    """Copy what two models of one architecture have in common: the trunk, and the scalars; heads of the same kind; the
    branch if both have as many blocks in it (or the token), with its head; the composer. Positions are interpolated to
    the new sizes, which `source` has afterwards, too. Raises UserError: no fit.
    """
    ours, theirs = model.options, source.options
    same_head = ours.head == theirs.head
    both_probabilistic = ours.probabilistic and theirs.probabilistic
    same_branch = both_probabilistic and (ours.uncertainty, ours.layers) == (theirs.uncertainty, theirs.layers)
    same_composer = type(model.composer) is type(source.composer) and ours.embed_dim == theirs.embed_dim
    same_log_var = same_branch and same_head and ours.log_var_width == theirs.log_var_width
    (name, shape), (their_name, their_shape) = ((m.config["name"], m.config["architecture"]) for m in (model, source))
    check_architecture(name, shape, their_name, their_shape, where, SIZES)
    if both_probabilistic and not same_branch:
        here, there = (
            f"{o.n_unc_layers} blocks in its uncertainty branch"
            if o.uncertainty == "branch"
            else f"an uncertainty token ({o.uncertainty})"
            for o in (ours, theirs)
        )
        logger.warning(f"{where} has {there}, this model has {here}: the uncertainty starts from random weights.")
    if hasattr(source.visual, "trunk") and source.image_size != model.image_size:  # timm's
        fit_image_size(source.visual.trunk, shape["vision_cfg"]["timm_model_name"], model.image_size)
    own, given = model.state_dict(), source.state_dict()
    resize_positions(given, model)

    def taken(key: str) -> bool:
        tower, _, name = key.partition(".")
        if tower == "composer":
            return same_composer
        if name.startswith("mean_head."):
            return same_head
        if name.startswith("log_var_head."):
            return same_log_var
        if tower in ("visual", "text"):
            return same_branch or getattr(model, tower).place(name).part != "branch"
        return tower in given  # a scalar

    kept = {key: own[key] for key in own if not taken(key)}
    load_strictly(model, kept | {key: given[key] for key in own if key in given and key not in kept}, where)


def vocabulary_for(
    name: str, given: str | None, pretrained: str | None, data: Iterable[str | Path], texts: Iterable[str] | None = None
) -> str | list[str] | None:
    """The vocabulary that `create_model` needs, if any: the given one, that of `texts`, or the file beside the data."""
    if given or not reads_words(read_architecture(name)) or (pretrained and saved_files(pretrained)):
        return given
    if texts is not None:
        return [word for word, _ in frequent_words(count_words(texts))]
    return str(find_vocabulary(data))


def fill_word_vectors(model: DualEncoder, path: str | Path) -> str:
    """Start the word embeddings from vectors in GloVe's text format, plain or .gz; says how many words had one."""
    words = model.config["architecture"]["text_cfg"].get("vocabulary", ())
    vectors = read_vectors(path, words)
    if not vectors:
        raise UserError(
            f"{path} has a vector of none of the {len(words):,} words of the model's vocabulary.",
            "Name vectors of the captions' language, with lower-case words, or leave word_vectors out.",
        )
    given, width = len(next(iter(vectors.values()))), model.text.table.shape[1]
    if given != width:
        raise UserError(
            f"The word vectors have {given} numbers, the model's {width}.",
            f"Name vectors of {width} numbers, or an architecture whose text width is {given}.",
        )
    with torch.no_grad():
        for row, word in enumerate(words, FIRST_WORD):
            if word in vectors:
                model.text.table[row] = torch.from_numpy(vectors[word])
    found = len(vectors)
    few = ", fewer than half: the others are random" if found < len(words) / 2 else ""
    return f"{found:,} of {len(words):,} words start from a vector in {path}{few}"
