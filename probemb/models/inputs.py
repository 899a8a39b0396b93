"""Inputs of a model: images to tensors, texts to tokens, and refusals of data or models that do not fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from open_clip import transform as oc
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv
from torchvision.transforms.functional import get_dimensions

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.image_loader import Images
from probemb.data.images import as_pixels, resize
from probemb.data.words import split_words
from probemb.errors import UserError
from probemb.models.architectures import reads_regions, reads_words
from probemb.models.options import Augmentation
from probemb.models.towers.words import WordTokenizer
from probemb.models.weights import refused

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


def create_transforms(model_or_config, augmentation: Augmentation | None = None, resize: str = "pil") -> Transforms:
    """The preprocessing that belongs to a model (or to its `config`): random crops for training, centre crops else.

    A model that reads regions changes nothing. By `resize`, torch ("tensor") or PIL ("pil") crops and resizes, with the
    same crops from the same random state. PIL's, normalised, are open_clip's to the last bit.
    """
    config, a = _config(model_or_config), augmentation or Augmentation()
    if reads_regions(config.get("architecture")):
        return Transforms(identity, identity)
    wanted = dict(config["preprocess"])
    crop_pct = wanted.pop("crop_pct", None)
    preprocess = oc.PreprocessCfg(**wanted)
    evaluate = oc.image_transform_v2(replace(preprocess, resize_mode="shortest") if crop_pct else preprocess, False)
    first, *rest = (
        x for x in evaluate.transforms if not isinstance(x, oc.MaybeToTensor | tv.Normalize)
    )  # the model does
    if crop_pct:
        first = tv.Resize(int(np.max(preprocess.size) / crop_pct), first.interpolation)
    crop = tv.RandomResizedCrop(preprocess.size, a.scale, a.ratio, tv.InterpolationMode.BICUBIC)
    convert, pixels = [oc.MaybeConvertMode()], [as_pixels]
    if resize == "tensor":
        crop, first = RandomCrop(crop.size, crop.scale, crop.ratio, crop.interpolation), Resized(first)
        rest, convert, pixels = [x for x in rest if not isinstance(x, oc.MaybeConvertMode)], [], []
    train = [
        *(crop, *convert),
        *([oc.color_jitter(*a.color_jitter, p=a.color_jitter_prob)] if a.color_jitter_prob else ()),
        *([oc.gray_scale(a.gray_scale_prob)] if a.gray_scale_prob else ()),
        *pixels,
        *([tv.RandomHorizontalFlip(a.hflip)] if a.hflip else ()),
    ]
    return Transforms(tv.Compose(train), tv.Compose([first, *rest, *pixels]))


def identity(regions: Tensor) -> Tensor:
    return regions


class RandomCrop(tv.RandomResizedCrop):
    """torchvision's RandomResizedCrop, to (3, h, w) uint8."""

    @staticmethod
    def get_params(image, scale: Sequence[float], ratio: Sequence[float]) -> tuple[int, int, int, int]:
        """Top, left, height and width; torchvision's to the bit, in half of its time."""
        _, height, width = get_dimensions(image)
        number, log_ratio = torch.empty(1), torch.tensor(ratio).log_().tolist()
        for _ in range(10):
            area = height * width * number.uniform_(*scale).item()
            aspect = number.uniform_(*log_ratio).exp_().item()
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return *(torch.randint(0, free + 1, (1,)).item() for free in (height - h, width - w)), h, w
        h, w = min(height, round(width / min(ratio))), min(width, round(height * max(ratio)))
        return (height - h) // 2, (width - w) // 2, h, w

    def forward(self, image: Image.Image) -> Tensor:
        top, left, height, width = self.get_params(image, self.scale, self.ratio)
        crop = as_pixels(image)[:, top : top + height, left : left + width]
        return resize(crop, self.size, self.interpolation.value)


class Resized:
    """A PIL image resized to (3, h, w) uint8, to the size that torchvision's or open_clip's `step` would give it."""

    def __init__(self, step: tv.Resize):
        self.step = step

    def __call__(self, image: Image.Image) -> Tensor:
        width, height = self.step(Image.new("1", image.size)).size
        return resize(as_pixels(image), (height, width), self.step.interpolation.value)


# ---------------------------------------------------------------------------------------------------------------- texts


def create_tokenizer(model_or_config, folder: Path | None = None) -> Callable[[list[str]], Tensor]:
    """The tokenizer of a model: texts -> (B, context_length) int64. Raises UserError: it is not available."""
    config = _config(model_or_config)["architecture"]
    text = config["text_cfg"]
    length, name = text.get("context_length", 77), text.get("hf_tokenizer_name")
    if reads_words(config):
        return WordTokenizer(text["vocabulary"], length)
    if not name:
        return Tokenizer(length)
    remedy = (
        "Install the package transformers (pip install 'probemb[hf]') and check the network; or download the files of "
        f"{name} elsewhere ({TOKENIZER}, tokenizer_config.json, special_tokens_map.json), and put them into the "
        "model's folder."
    )
    with refused(f"The tokenizer '{name}' of this model is not available", remedy):
        return HFTokenizer(
            str(folder) if folder is not None and (folder / TOKENIZER).is_file() else name,
            context_length=length,
            tokenizer_mode=text.get("tokenizer_mode"),
            trust_remote_code=False,
            **text.get("tokenizer_kwargs", {}),
        )


class Tokenizer(SimpleTokenizer):
    """open_clip's byte-pair encoding, for texts of any origin: start token, words, end token, zeros.

    It reads no further than the context is long, cuts words, and bounds its cache, so that time and memory do not
    depend on the texts.
    """

    def __init__(self, context_length: int):
        super().__init__(context_length=context_length)
        self._special = dict(self.cache)
        self._known: dict[str, list[int]] = {}  # words

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        length, texts = context_length or self.context_length, [texts] if isinstance(texts, str) else texts
        tokens = np.zeros((len(texts), length), np.int64)
        for row, text in zip(tokens, texts):
            known = [self.sot_token_id, *self.encode(text)[: length - 2], self.eot_token_id]
            row[: len(known)] = known
        return torch.from_numpy(tokens)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        text = text[:MAX_CHARACTERS]
        plain = text.isascii() and text.isprintable() and "&" not in text
        text = " ".join(text.split()).lower() if plain else self.clean_fn(text)  # the same, in less time
        for match in self.pat.finditer(text):
            if len(tokens) >= self.context_length - 2:
                break
            if (word := match.group()[:MAX_WORD]) not in self._known:
                if len(self._known) >= MAX_CACHED_WORDS:
                    self._known, self.cache = {}, dict(self._special)
                letters = "".join(self.byte_encoder[byte] for byte in word.encode("utf-8", "replace"))
                self._known[word] = [self.encoder[piece] for piece in self.bpe(letters).split(" ")]
            tokens += self._known[word]
        return tokens


def unknown_words(tokenizer: Callable, texts: Sequence[str]) -> list[str]:
    """Words that a model with a vocabulary of words does not know."""
    return tokenizer.unknown_words(list(texts)) if hasattr(tokenizer, "unknown_words") else []


def _config(model_or_config) -> dict:
    return model_or_config if isinstance(model_or_config, dict) else model_or_config.config


# ------------------------------------------------------------------------------------------------------------- refusals


def check_images(model, images: Images) -> None:
    """Raise UserError for regions and a model that reads pixels, the reverse, or regions of another shape."""
    wanted = getattr(getattr(model, "image_tower", None), "region_shape", None)
    given = getattr(images, "shape", None)  # of `RegionImages`
    if wanted != given:
        read, held = ("pixels" if x is None else f"{x[0]} regions of {x[1]} numbers" for x in (wanted, given))
        raise UserError(
            f"The model reads {read} of each image, and {images.source} holds {held}.",
            f"Name data with {read}, or an architecture for {held} (a json in probemb/models/configs).",
        )


def check_words(model, captions: CaptionDataset) -> None:
    """Raise UserError for captions of which a model's vocabulary has less than half of the words."""
    architecture, texts = _config(model)["architecture"], captions.flat()
    if not reads_words(architecture):
        return
    known = set(architecture["text_cfg"]["vocabulary"])
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
        trained = f" (objective {model.objective})" if model.objective else ""
        raise UserError(f"{name} is a point model{trained}, which has no uncertainty, and {wanted}.", remedy)


def check_single_embeddings(model, name: str) -> None:
    """Raise UserError for a model that does not compare pictures and texts by one embedding each."""
    for what, applies in (
        (f"has {model.n_embeddings} embeddings of an item", model.n_embeddings > 1),
        ("compares the tokens of images and texts", model.attention is not None),
        ("reads precomputed regions of images", reads_regions(model.config["architecture"])),
    ):
        if applies:
            raise UserError(
                f"The model {name} {what}.",
                "Name one with an embedding of each image; zeroshot.retrieval measures all others.",
            )
