"""Prompt templates, and the cached embeddings of all class x template texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.labelled.classes import read_text
from probemb.data.labelled.prompts import SINGLE_TEMPLATE, Templates, imagenet_templates
from probemb.errors import UserError
from probemb.files import replace_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from probemb.evaluation.embedding import Embedder
    from probemb.gaussian import Gaussian

CACHE_FORMAT = "probemb text embeddings 1"


def read_templates(path: str | Path | None, class_names: Sequence[str] = ()) -> Templates:
    """CLIP's 80 templates, or those of a file: one a line, each with `{}` where the class name goes, or a JSON object
    {class name: [prompts]} with the same number of prompts for every class.

    Raises:
        UserError: a missing or empty file, a template without `{}` or that occurs twice, a class without its prompts.
    """
    if path is None:
        return imagenet_templates()
    path = Path(path)
    if path.suffix.lower() == ".json":
        return _prompts_of_classes(path, class_names)
    lines = [line.strip() for line in read_text(path, "template file", "--templates").splitlines()]
    templates = [line for line in lines if line]
    if not templates:
        raise UserError(f"The template file {path} is empty.", 'Write one template a line, like "a photo of a {}."')
    for number, line in enumerate(lines, 1):
        if line and line.count("{}") != 1:
            raise UserError(
                f"Line {number} of {path} does not hold `{{}}` exactly once: {line[:80]!r}.",
                'Put {} where the class name goes, as in "a photo of a {}."',
            )
    if len(set(templates)) < len(templates):
        twice = next(t for t in templates if templates.count(t) > 1)
        raise UserError(f"The template {twice[:80]!r} occurs twice in {path}.", "Keep one of them.")
    return templates


def _prompts_of_classes(path: Path, class_names: Sequence[str]) -> dict[str, list[str]]:
    try:
        found = json.loads(read_text(path, "prompt file", "--templates"))
        prompts = {name: found[name] for name in class_names}
    except (ValueError, RecursionError, TypeError) as error:
        raise UserError(f"{path} is no JSON object of prompts.", 'Write {"class name": ["prompt", …], …}.') from error
    except KeyError as error:
        raise UserError(f"{path} has no prompts for the class {error}.", "Give every class its prompts.") from error
    texts = all(isinstance(row, list) and row and all(isinstance(t, str) for t in row) for row in prompts.values())
    if not texts or len({len(row) for row in prompts.values()}) > 1:
        raise UserError(f"The prompts of {path} are not lists of one length.", "Give every class the same number.")
    return prompts


def single_index(templates: Templates) -> int:
    """The index of the template of `single`: "a photo of a {}.", or else the first."""
    return list(templates).index(SINGLE_TEMPLATE) if SINGLE_TEMPLATE in templates else 0


@dataclass(frozen=True)
class PromptEmbeddings:
    """Embeddings of texts, and their origin: `cache` is "computed", "read", "off" or "recomputed"."""

    gaussian: Gaussian  # (T, D)
    cache: str
    message: str = ""


def embed_prompts(embedder: Embedder, texts: Sequence[str], cache: str | Path | None = None) -> PromptEmbeddings:
    """Embed texts, or read their embeddings from the cache folder.

    The file is named by a SHA-256 over the model's weights, its configuration, the precision and the tokens. It also
    holds the tokens and a checksum; a file with other content is recomputed and replaced, and `message` says so.

    Args:
        cache: folder of cache files; None computes and writes nothing.

    Returns:
        PromptEmbeddings with a Gaussian (T, D), float32, CPU.
    """
    tokens = embedder.tokenizer(list(texts))
    if cache is None:
        return PromptEmbeddings(_compute(embedder, tokens), "off")
    identity = _identity(embedder.model, tokens, embedder.device.autocast_dtype)
    file = Path(cache).expanduser() / f"{identity}.safetensors"
    state, message = "computed", ""
    if file.exists():
        try:
            return PromptEmbeddings(_read_cache(file, identity, tokens), "read")
        except (ValueError, OSError) as error:
            state, message = "recomputed", f"The cached text embeddings {file} are not used and replaced: {error}."
    gaussian = _compute(embedder, tokens)
    try:
        _write_cache(file, identity, tokens, gaussian)
    except OSError as error:
        message = f"The text embeddings are not cached: {error}."
    return PromptEmbeddings(gaussian, state, message)


def _compute(embedder: Embedder, tokens: Tensor) -> Gaussian:
    with embedder.show("prompts", len(tokens)) as advance:
        return embedder.tokens(tokens, advance)


def _identity(model: torch.nn.Module, tokens: Tensor, autocast: torch.dtype | None) -> str:
    from probemb.models import digest_model

    digest = hashlib.sha256(CACHE_FORMAT.encode())
    digest.update(f"{autocast}|{tuple(tokens.shape)}|{tokens.dtype}".encode())
    digest.update(tokens.contiguous().numpy().tobytes())
    digest_model(digest, model)
    return digest.hexdigest()


def _checksum(gaussian: Gaussian) -> str:
    digest = hashlib.sha256()
    for tensor in (gaussian.mean, gaussian.log_var):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _read_cache(file: Path, identity: str, tokens: Tensor) -> Gaussian:
    """Read a cache file. Raises ValueError with the reason if its content is not the expected one."""
    import torch
    from safetensors import SafetensorError, safe_open

    from probemb.gaussian import Gaussian

    try:
        with safe_open(str(file), framework="pt") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("format") != CACHE_FORMAT or metadata.get("identity") != identity:
                raise ValueError("it was made for something else")
            tensors = {name: stored.get_tensor(name) for name in ("tokens", "mean", "log_var")}
    except SafetensorError as error:
        raise ValueError(f"it is damaged ({str(error)[:100]})") from error
    if not torch.equal(tensors["tokens"].to(tokens.dtype), tokens):
        raise ValueError("it holds other texts")
    if tensors["mean"].shape != tensors["log_var"].shape or len(tensors["mean"]) != len(tokens):
        raise ValueError("its tensors do not fit together")
    gaussian = Gaussian(tensors["mean"], tensors["log_var"])
    if _checksum(gaussian) != metadata.get("checksum"):
        raise ValueError("its checksum is wrong")
    return gaussian


def _write_cache(file: Path, identity: str, tokens: Tensor, gaussian: Gaussian) -> None:
    from safetensors.torch import save_file

    metadata = {"format": CACHE_FORMAT, "identity": identity, "checksum": _checksum(gaussian)}
    tensors = {"tokens": tokens.int(), "mean": gaussian.mean, "log_var": gaussian.log_var}
    replace_file(file, lambda aside: save_file({name: t.contiguous() for name, t in tensors.items()}, aside, metadata))
