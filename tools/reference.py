"""Write docs/reference.md: all commands, and options with their defaults; tests/test_docs.py compares the page."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from finetune.adapt import AdaptConfig
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
from zeroshot.uncertainty import UncertaintyConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
INTRODUCTION = """# Reference

Written by `python -m tools.reference`. An option is a key of the YAML file that `--config` names, or `--key value`,
with `-` or `_`. Options win over files, files over these defaults. No default, or –, means null; `--no-KEY` sets it.
Each is explained where it comes first. `--help` lists a command's common options, `--help-all` all of them.

## Commands

Run each as `python -m NAME`.

"""


def page() -> str:
    parts = [INTRODUCTION + "\\\n".join(f"`{name}`: {about}" for name, about in _commands()) + "\n"]
    said, choices = {}, partial(_choices, {})
    for name, config in (
        ("pretrain.run", Pretraining()),
        ("finetune.run", Finetuning()),
        ("finetune.adapt", AdaptConfig()),
        ("zeroshot.imagenet", ImagenetConfig()),
        ("zeroshot.retrieval", RetrievalConfig()),
        ("zeroshot.uncertainty", UncertaintyConfig()),
    ):
        parts += [f"## {name}\n", *_blocks(config, said)]
        if name == "pretrain.run":
            parts.append("**loss**, of each objective\n\n" + "\n".join(choices(OBJECTIVES, OBJECTIVES, {})) + "\n")
        if name == "finetune.run":
            methods = {name: cls.Options for name, cls in METHODS.items()}
            files = {name: read_file(CONFIGS / f"{name}.yaml").items() for name in METHODS}
            own = {name: {k[5:]: v for k, v in keys if k.startswith("loss.")} for name, keys in files.items()}
            groups = (f"*{group}*\n\n" + "\n".join(choices(names, methods, own)) for group, names in GROUPS.items())
            parts.append("**loss**, of each method\n\n" + "\n\n".join(groups) + "\n")
    return "\n".join(parts)


def _commands() -> Iterator[tuple[str, str]]:
    """Modules that users run, and the first line of their docstrings."""
    for command in commands().values():
        yield command.module, re.split(r"[:;] |, (?=as |with |for )", command.about)[0].rstrip(".")


def _blocks(config: Any, said: dict[tuple[str, str], Any], prefix: str = "") -> Iterator[str]:
    """A line per option, group after group; one that an earlier command explains is named, with another default."""
    texts, hints, lines, again, groups = _texts(type(config)), get_type_hints(type(config)), [], [], []
    for field in fields(config):
        key, value, text = prefix + field.name, getattr(config, field.name), texts.get(field.name, "")
        types = (hints[field.name], *get_args(hints[field.name]))
        names = [name for one in types if get_origin(one) is Literal for name in get_args(one)]
        if text and not any(str(name) in text for name in names):
            text += f": {listed(names, 'or')}" if names else ""
        known = field.name, text
        if is_dataclass(value):
            groups += [(key, value)] * (field.name != "loss")  # whose options depend on another one
        elif known in said:
            again.append(f"`{key}`" + f" {_shown(value)}" * (value != said[known]))
        else:
            lines.append(f"`{key}` {_shown(value)}".removesuffix(" –") + f": {text}")
        said[known] = value
    lines += [f"As above: {', '.join(again)}"] * bool(again)
    yield "\\\n".join(lines) + "\n"
    for key, value in groups:
        yield f"**{key}**\n"
        yield from _blocks(value, said, f"{key}.")


def _choices(said: dict, names: Any, classes: Mapping[str, Any], own: Mapping[str, dict]) -> Iterator[str]:
    """A line per class with its options: beside those of an earlier one, those that differ, and help where it is new.

    `said`: the help given last, by option; `own`: defaults by name, in place of the class'.
    """
    defaults = {name: {f.name: f.default for f in fields(classes[name])} | own.get(name, {}) for name in names}
    done: dict[str, type] = {}
    for name in names:
        options, shown = classes[name], []
        bases = [other for other in reversed(done) if defaults[other].keys() <= defaults[name].keys()]
        base = max(bases, key=lambda other: len(defaults[other].items() & defaults[name].items()), default=None)
        before, texts = (defaults[base], _texts(done[base])) if base else ({}, {})
        for field in fields(options):
            key, text, default = field.name, _texts(options).get(field.name, ""), defaults[name][field.name]
            if (before.get(key), texts.get(key)) != (default, text):
                shown.append(f"`{key}` {_shown(default)}" + f" ({text})" * (said.get(key) != text))
                said[key] = text
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
