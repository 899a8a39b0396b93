"""Write docs/reference.md: every command, and every option of training and evaluation with its default.

python -m tools.reference           # tests/test_docs.py fails while the page differs from this
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from finetune.config import CONFIGS
from finetune.config import Config as Finetuning
from finetune.methods import GROUPS, METHODS
from pretrain.config import Config as Pretraining
from pretrain.objectives import OBJECTIVES
from probemb.cli.configuration import docstring_texts, read_file
from probemb.cli.console import commands
from probemb.data.reading import listed
from zeroshot.imagenet import ImagenetConfig
from zeroshot.retrieval import RetrievalConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
INTRODUCTION = """# Reference

Written by `python -m tools.reference`. An option is a key of the YAML file that `--config` names, or `--key value`,
with `-` or `_`. Options win over files, and files over these defaults; `--no-KEY` is null, shown as –. `--help` lists a
command's common options, `--help-all` all of them.

## Commands

| `python -m` | |
|---|---|
"""


def page() -> str:
    parts = [f"{INTRODUCTION}{''.join(f'| `{name}` | {about} |{chr(10)}' for name, about in _commands())}"]
    said: dict[str, Any] = {}
    for name, config in (
        ("pretrain.run", Pretraining()),
        ("finetune.run", Finetuning()),
        ("zeroshot.imagenet", ImagenetConfig()),
        ("zeroshot.retrieval", RetrievalConfig()),
    ):
        parts += [f"## {name}\n", *_blocks(config, said)]
        if name == "pretrain.run":
            parts.append("**loss**, of each objective\n\n" + "\n".join(_choices(OBJECTIVES, OBJECTIVES)) + "\n")
        if name == "finetune.run":
            methods = {name: cls.Options for name, cls in METHODS.items()}
            files = {name: read_file(CONFIGS / f"{name}.yaml").items() for name in METHODS}
            own = {name: {k[5:]: v for k, v in keys if k.startswith("loss.")} for name, keys in files.items()}
            groups = (f"*{group}*\n\n" + "\n".join(_choices(names, methods, own)) for group, names in GROUPS.items())
            parts.append("**loss**, of each method\n\n" + "\n\n".join(groups) + "\n")
    return "\n".join(parts)


def _commands() -> Iterator[tuple[str, str]]:
    """Modules that users run, and the first line of their docstrings."""
    for command in commands().values():
        yield command.module, re.split(r"[:;] |, (?=as |with |for )", command.about)[0].rstrip(".")


def _blocks(config: Any, said: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A line per option, group after group; one that an earlier command has, with the same default, is only named."""
    texts, hints, lines, again, groups = _texts(type(config)), get_type_hints(type(config)), [], [], []
    for field in fields(config):
        key, value, text = prefix + field.name, getattr(config, field.name), texts.get(field.name, "")
        types = (hints[field.name], *get_args(hints[field.name]))
        names = [name for one in types if get_origin(one) is Literal for name in get_args(one)]
        if text and not any(str(name) in text for name in names):
            text += f": {listed(names, 'or')}" if names else ""
        if is_dataclass(value) and field.name != "loss":
            groups.append((key, value))
        elif said.get(key) == (value, text):
            again.append(f"`{key}`")
        elif field.name != "loss":
            said[key] = value, text
            lines.append(f"`{key}` {_shown(value)}: {text}")
    if again:
        lines.append(f"As above: {', '.join(again)}")
    yield "\\\n".join(lines) + "\n"
    for key, value in groups:
        yield f"**{key}**\n"
        yield from _blocks(value, said, f"{key}.")


def _choices(names: Any, classes: Mapping[str, Any], own: Mapping[str, dict] | None = None) -> Iterator[str]:
    """A line per class with its options: of a subclass of an earlier one those that differ, help where it is new.

    `own`: defaults by name, in place of the class'.
    """
    defaults = {name: {f.name: f.default for f in fields(classes[name])} | (own or {}).get(name, {}) for name in names}
    done: dict[str, type] = {}
    said: dict[str, str] = {}
    for name in names:
        options, shown = classes[name], []
        base = next((other for other in reversed(done) if issubclass(options, done[other])), None)
        before = defaults[base] if base else {}
        for field in fields(options):
            text = _texts(options).get(field.name, "")
            about = f" ({text})" if said.get(field.name) != text else ""
            default = defaults[name][field.name]
            if about or field.name not in before or before[field.name] != default:
                shown.append(f"`{field.name}` {_shown(default)}{about}")
            said[field.name] = text
        yield f"- `{name}`: {', '.join([f'as `{base}`'] * bool(base) + shown) or 'none'}"
        done[name] = options


def _texts(cls: type) -> dict[str, str]:
    """Texts of the fields, up to the first semicolon."""
    return {key: re.split(r"; (?![^(]*\))", text)[0].rstrip(".") for key, text in docstring_texts(cls).items()}


def _shown(value: Any) -> str:
    if value in (None, "", [], ()):
        return "–"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
