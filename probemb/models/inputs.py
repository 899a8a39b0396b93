"""Inputs of a model: images to tensors, texts to tokens, and refusals of data or models that do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import AugmentationCfg, MaybeConvertMode, PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ToTensor

from probemb.data.captions.find import CaptionDataset
from probemb.data.image_loader import Images, RegionImages
from probemb.data.pixels import RandomCrop, RandomErasing, Resized, as_pixels
from probemb.data.words import split_words
from probemb.errors import UserError
from probemb.models.architectures import reads_regions, reads_words
from probemb.models.options import Augmentation
from probemb.models.towers.words import WordTokenizer

MAX_CHARACTERS = 4096  # of a text; what lies behind cannot fill a context that the characters before have not filled
MAX_WORD = 128  # characters of one word: byte-pair encoding takes time quadratic in a word's length
MAX_CACHED_WORDS = 200_000
TOKENIZER = "tokenizer.json"
SAMPLED_TEXTS = 10_000  # at most, of which the words are looked up in a vocabulary


# --------------------------------------------------------------------------------------------------------------- images


class Transforms(NamedTuple):
    """PIL image -> (3, H, W) uint8, which the model normalises. `train` draws from torch's global random state."""

    train: Callable[[Image.Image], Tensor]
    evaluate: Callable[[Image.Image], Tensor]

    def __call__(self, image):
        raise UserError(
            "These are two transforms.", "Call transforms.evaluate(image), or in training transforms.train."
        )


def create_transforms(model_or_config, augmentation: Augmentation | None = None, resize: str = "pil") -> Transforms:
    """The preprocessing that belongs to a model (or to its `config`): random crops for training, centre crops else.

    Regions come prepared: a model that reads them changes nothing. By `resize`, torch ("tensor") or PIL ("pil") crops
    and resizes, with the same crops from the same random state. PIL's, normalised, are open_clip's to the last bit.
    """
    config, augmentation = _config(model_or_config), augmentation or Augmentation()
    if reads_regions(config.get("architecture")):
        return Transforms(identity, identity)
    wanted = dict(config["preprocess"])
    crop_pct = wanted.pop("crop_pct", None)
    preprocess = PreprocessCfg(**wanted)
    with warnings.catch_warnings():  # open_clip calls colour options unused, although it has just used them
        warnings.filterwarnings("ignore", message="Unused augmentation")
        options = {key: getattr(augmentation, key) for key in ("color_jitter", "color_jitter_prob", "gray_scale_prob")}
        train = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(augmentation.scale, **options))
    crop = train.transforms[0]
    if isinstance(crop, RandomResizedCrop):
        crop.ratio = augmentation.ratio
    evaluate = image_transform_v2(replace(preprocess, resize_mode="shortest") if crop_pct else preprocess, False)
    if crop_pct:
        first = evaluate.transforms[0]
        evaluate.transforms[0] = Resize(int(np.max(preprocess.size) / crop_pct), first.interpolation)
    train, evaluate = (_without_floats(t, resize) for t in (train, evaluate))
    more = [RandomHorizontalFlip(augmentation.hflip)] if augmentation.hflip else []
    if augmentation.re_prob:
        more.append(RandomErasing(augmentation.re_prob, augmentation.re_count, preprocess.mean, preprocess.std))
    return Transforms(Compose([*train.transforms, *more]), evaluate)


def _without_floats(transform: Compose, resize: str) -> Compose:
    """open_clip's transform without its last steps, conversion to float and normalisation."""
    first, *steps = (step for step in transform.transforms if not isinstance(step, ToTensor | Normalize))
    if resize == "pil":
        return Compose([first, *steps, as_pixels])
    if isinstance(first, RandomResizedCrop):
        first = RandomCrop(first.size, first.scale, first.ratio, first.interpolation)
    else:
        first = Resized(first)
    return Compose([first, *(step for step in steps if not isinstance(step, MaybeConvertMode))])


def identity(regions: Tensor) -> Tensor:
    return regions


# ---------------------------------------------------------------------------------------------------------------- texts


def create_tokenizer(model_or_config, folder: Path | None = None) -> Callable[[list[str]], Tensor]:
    """The tokenizer that belongs to a model: list of texts -> (B, context_length) int64, padded.

    A Hugging Face tokenizer whose files are in the model's `folder` is not asked of the hub. Raises UserError: it is
    not available, or the model has too small a vocabulary.
    """
    text = _config(model_or_config)["architecture"]["text_cfg"]
    context_length = text.get("context_length", 77)
    if reads_words(_config(model_or_config)["architecture"]):
        return WordTokenizer(text["vocabulary"], context_length)
    name = text.get("hf_tokenizer_name")
    if not name:
        return Tokenizer(context_length, text.get("vocab_size", 49408))
    local = folder is not None and (folder / TOKENIZER).is_file()
    try:
        return HFTokenizer(
            str(folder) if local else name,
            context_length=context_length,
            tokenizer_mode=text.get("tokenizer_mode"),
            trust_remote_code=False,
            **text.get("tokenizer_kwargs", {}),
        )
    except (ImportError, OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The tokenizer '{name}' of this model is not available.",
            "Install the package transformers (pip install 'probemb[hf]') and check the network; or download the "
            f"files of {name} elsewhere ({TOKENIZER}, tokenizer_config.json, special_tokens_map.json), and put "
            "them into the model's folder.",
        ) from error


class Tokenizer:
    """CLIP's byte-pair encoding, for texts of any origin: start token, words, end token, zeros.

    The tokens are open_clip's. In contrast to open_clip's tokenizer it reads no further than the context is long, cuts
    words at 128 characters, and bounds its cache, so that time and memory do not depend on the texts.
    """

    def __init__(self, context_length: int, vocab_size: int = 49408):
        self._bpe = SimpleTokenizer(context_length=context_length)
        if self._bpe.vocab_size > vocab_size:
            raise UserError(
                f"The model has {vocab_size} token embeddings, but CLIP's vocabulary has {self._bpe.vocab_size}.",
                "Set text_cfg.vocab_size of the architecture to 49408.",
            )
        self.context_length = context_length
        self._special = dict(self._bpe.cache)
        self._words: dict[str, tuple[int, ...]] = {}

    def __call__(self, texts: list[str] | str) -> Tensor:
        """(B, context_length) int64; a text that is too long is cut and still ends with the end token."""
        texts = [texts] if isinstance(texts, str) else texts
        result = np.zeros((len(texts), self.context_length), np.int64)
        for row, text in zip(result, texts):
            tokens = [self._bpe.sot_token_id, *self._encode(text), self._bpe.eot_token_id]
            row[: len(tokens)] = tokens
        return torch.from_numpy(result)

    def _encode(self, text: str) -> list[int]:
        room = self.context_length - 2
        bpe, tokens = self._bpe, []
        for match in bpe.pat.finditer(self._clean(text[:MAX_CHARACTERS])):
            if len(tokens) >= room:
                break
            word = match.group()[:MAX_WORD]
            found = self._words.get(word)
            tokens.extend(self._encode_word(word) if found is None else found)
        return tokens[:room]

    def _clean(self, text: str) -> str:
        """open_clip's cleaning, which leaves plain ASCII without entities alone but for its spaces and capitals."""
        if text.isascii() and text.isprintable() and "&" not in text:
            return " ".join(text.split()).lower()
        return self._bpe.clean_fn(text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        bpe = self._bpe
        if len(self._words) >= MAX_CACHED_WORDS:
            self._words.clear()
            bpe.cache = dict(self._special)
        letters = "".join(bpe.byte_encoder[byte] for byte in word.encode("utf-8", "replace"))
        tokens = self._words[word] = tuple(bpe.encoder[piece] for piece in bpe.bpe(letters).split(" "))
        return tokens


def unknown_words(tokenizer: Callable, texts: Sequence[str]) -> list[str]:
    """Words of texts that a model with a vocabulary of words does not know; other models read parts of words."""
    return tokenizer.unknown_words(list(texts)) if hasattr(tokenizer, "unknown_words") else []


def _config(model_or_config) -> dict:
    return model_or_config if isinstance(model_or_config, dict) else model_or_config.config


# ------------------------------------------------------------------------------------------------------------- refusals


def check_images(model, images: Images) -> None:
    """Raise UserError for regions and a model that reads pixels, the reverse, or regions of another shape."""
    wanted = getattr(getattr(model, "image_tower", None), "region_shape", None)
    given = images.shape if isinstance(images, RegionImages) else None
    if wanted != given:
        read, held = ("pixels" if x is None else f"{x[0]} regions of {x[1]} numbers" for x in (wanted, given))
        raise UserError(
            f"The model reads {read} of each image, and {images.source} holds {held}.",
            f"Name data with {read}, or an architecture for {held} (a json in probemb/models/configs).",
        )


def check_words(model, captions: CaptionDataset) -> None:
    """Raise UserError for captions of which a model's vocabulary has less than half of the words."""
    architecture = _config(model).get("architecture")
    if not reads_words(architecture):
        return
    known, texts = set(architecture["text_cfg"]["vocabulary"]), captions.flat()
    words = [word for text in texts[:: 1 + len(texts) // SAMPLED_TEXTS] for word in split_words(text)]
    share = sum(word in known for word in words) / max(1, len(words))
    if words and share < 0.5:
        raise UserError(
            f"The model's vocabulary has {share:.0%} of the words of {captions.source}: it is of another corpus.",
            f"Build one with `python -m tools.build_vocabulary {captions.source} --out vocabulary.txt`, of the split "
            "that is trained on (--split), and name it as model.vocabulary; a run in model.pretrained keeps its own.",
        )


def check_variances(model, name: str, wanted: str, remedy: str) -> None:
    """Raise UserError for a point model; `wanted`: what reads variances, with its verb."""
    if not model.probabilistic:
        objective = getattr(model, "objective", None)
        trained = f" (objective {objective})" if objective else ""
        raise UserError(f"{name} is a point model{trained}, which has no uncertainty, and {wanted}.", remedy)


def check_single_embeddings(model, name: str) -> None:
    """Raise UserError for a model that does not compare pictures and texts by one embedding each."""
    reasons = {
        f"has {model.n_embeddings} embeddings of an item": model.n_embeddings > 1,
        "compares the tokens of images and texts": model.attention is not None,
        "reads precomputed regions of images": reads_regions(model.config["architecture"]),
    }
    for what in (what for what, applies in reasons.items() if applies):
        raise UserError(
            f"The model {name} {what}.",
            "Name one with an embedding of each image; zeroshot.retrieval measures all others.",
        )
