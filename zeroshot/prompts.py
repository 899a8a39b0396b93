"""What is said about a class: templates, class names, and the embeddings of all class x template texts, cached."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from probemb.gaussian import Gaussian

MAX_FILE = 64 << 20  # bytes of a class or template file
CACHE_FORMAT = "probemb text embeddings 1"


@dataclass(frozen=True)
class Classes:
    """The classes to choose from.

    Attributes:
        names: what stands in the prompts, in the order of the labels.
        keys: the name of each class in the data (a WordNet id, a folder), or None where only the order is known.
        source: where they come from, for messages.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] | None
    source: str

    def __len__(self) -> int:
        return len(self.names)


def imagenet_classes() -> Classes:
    """The 1000 ILSVRC classes under CLIP's names, in the order of the sorted WordNet ids."""
    from probemb.classify import imagenet_class_names

    return Classes(tuple(imagenet_class_names()), None, "the built-in ImageNet names")


def read_classes(path: str | Path) -> Classes:
    """Read a class-name file.

    One of: one name a line; a JSON list of names; a JSON object {folder: name}; a JSON list of objects with a name
    under "name", "open_clip_name" or "class_name", and optionally "index" and a key under "wnid", "key" or "folder".

    Raises:
        UserError: a missing, empty or unreadable file, an empty name, an index that is missing or occurs twice.
    """
    path = Path(path)
    text = _read_text(path, "class-name file", "--classes")
    if path.suffix.lower() == ".json":
        names, keys = _classes_from_json(text, path)
    else:
        names, keys = [line.strip() for line in text.splitlines()], None
        while names and not names[-1]:
            names.pop()
    if not names:
        raise UserError(f"The class-name file {path} is empty.", "Write one class name a line.")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"Class {i} in {path} has no name.", "Give every class a name; the line is its label.")
    if keys and len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"{path} lists the class {twice} twice.", "Keep one entry for each class.")
    return Classes(tuple(name.strip() for name in names), tuple(keys) if keys else None, str(path))


def _classes_from_json(text: str, path: Path) -> tuple[list, list[str] | None]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {str(error)[:200]}.", "Correct the class-name file.") from error
    if isinstance(content, dict) and isinstance(content.get("classes"), list):
        content = content["classes"]
    if isinstance(content, dict):
        return list(content.values()), [str(key) for key in content]
    if not isinstance(content, list):
        raise UserError(f"{path} holds no list of class names.", "Write a JSON list of names, or one name a line.")
    if not any(isinstance(entry, dict) for entry in content):
        return content, None

    def field(entry, *names):
        return next((entry[n] for n in names if isinstance(entry, dict) and n in entry), None)

    indices = [field(entry, "index", "label") for entry in content]
    if any(index is not None for index in indices):
        if sorted(str(i) for i in indices) != sorted(str(i) for i in range(len(content))):
            raise UserError(
                f'The "index" entries of {path} are not 0 to {len(content) - 1}, each once.',
                "Number the classes from 0, without gaps.",
            )
        content = [entry for _, entry in sorted(zip(indices, content), key=lambda pair: int(pair[0]))]
    names = [field(entry, "name", "open_clip_name", "class_name") for entry in content]
    keys = [field(entry, "wnid", "key", "folder") for entry in content]
    return names, None if any(key is None for key in keys) else [str(key) for key in keys]


def read_templates(path: str | Path | None) -> list[str]:
    """CLIP's 80 templates, or those of a file: one a line, each with `{}` where the class name goes.

    Raises:
        UserError: a missing or empty file, a template without `{}`, a template that occurs twice.
    """
    if path is None:
        from probemb.classify import imagenet_templates

        return imagenet_templates()
    path = Path(path)
    lines = [line.strip() for line in _read_text(path, "template file", "--templates").splitlines()]
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
        raise UserError(f"The template {twice[:80]!r} stands twice in {path}.", "Keep one of them.")
    return templates


def _read_text(path: Path, what: str, option: str) -> str:
    if not path.is_file():
        raise UserError(f"The {what} {path} does not exist.", f"Check the path given to {option}.")
    if path.stat().st_size > MAX_FILE:
        raise UserError(f"The {what} {path} is larger than {MAX_FILE >> 20} MiB.", f"Check the path given to {option}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"The {what} {path} cannot be read as UTF-8 text.", "Save it as UTF-8.") from error


def single_index(templates: Sequence[str]) -> int:
    """Which template `single` stands for: "a photo of a {}.", or the first where a list does not have it."""
    from probemb.classify import SINGLE_TEMPLATE

    return list(templates).index(SINGLE_TEMPLATE) if SINGLE_TEMPLATE in templates else 0


@dataclass(frozen=True)
class PromptEmbeddings:
    """Embeddings of texts, and where they came from: `cache` is "computed", "read", "off" or "recomputed"."""

    gaussian: Gaussian  # (T, D), or (C, P, D) once shaped
    cache: str
    message: str = ""


def embed_texts(
    model: torch.nn.Module,
    tokenizer: Callable[[list[str]], Tensor],
    texts: Sequence[str],
    *,
    cache: str | Path | None = None,
    batch_size: int = 256,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> PromptEmbeddings:
    """Embed texts, or read their embeddings from the cache folder.

    The file is named by a SHA-256 over the model's weights, its configuration, the precision and the tokens; it
    also holds the tokens and a checksum of the embeddings, and both are compared before it is believed. A file
    that is damaged or of other content is computed again and replaced, and `message` says so.

    Args:
        cache: folder of cache files; None computes and writes nothing.

    Returns:
        PromptEmbeddings with a Gaussian (T, D), float32, CPU.
    """
    from probemb.classify import encode_texts

    tokens = tokenizer(list(texts))

    def compute() -> Gaussian:
        return encode_texts(
            model.encode_text, tokens, batch_size=batch_size, device=device, autocast=autocast, progress=progress
        )

    if cache is None:
        return PromptEmbeddings(compute(), "off")
    identity = _identity(model, tokens, autocast)
    file = Path(cache).expanduser() / f"{identity}.safetensors"
    state, message = "computed", ""
    if file.exists():
        try:
            found = _read_cache(file, identity, tokens)
        except (ValueError, OSError) as error:
            state, message = "recomputed", f"The cached text embeddings {file} are not used and replaced: {error}."
        else:
            if progress:
                progress(len(texts))
            return PromptEmbeddings(found, "read")
    gaussian = compute()
    try:
        _write_cache(file, identity, tokens, gaussian)
    except OSError as error:
        message = f"The text embeddings are not cached: {error}."
    return PromptEmbeddings(gaussian, state, message)


def _identity(model: torch.nn.Module, tokens: Tensor, autocast: torch.dtype | None) -> str:
    import torch

    digest = hashlib.sha256(CACHE_FORMAT.encode())
    digest.update(json.dumps(model.config, sort_keys=True, default=str).encode())
    digest.update(f"{autocast}|{tuple(tokens.shape)}|{tokens.dtype}".encode())
    digest.update(tokens.contiguous().numpy().tobytes())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checksum(gaussian: Gaussian) -> str:
    digest = hashlib.sha256()
    for tensor in (gaussian.mean, gaussian.log_var):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _read_cache(file: Path, identity: str, tokens: Tensor) -> Gaussian:
    """Raises ValueError with the reason when the file is not what its name says."""
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

    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": CACHE_FORMAT, "identity": identity, "checksum": _checksum(gaussian)}
    tensors = {"tokens": tokens.int().contiguous(), "mean": gaussian.mean, "log_var": gaussian.log_var}
    handle, aside = tempfile.mkstemp(dir=file.parent, suffix=".part")
    os.close(handle)
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, aside, metadata=metadata)
        os.chmod(aside, 0o644)
        os.replace(aside, file)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
