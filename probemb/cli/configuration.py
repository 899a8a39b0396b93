"""A command's configuration: a frozen dataclass read from YAML and dotted overrides, and written back."""

import argparse
import copy
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from probemb.cli.help import HELP, HELP_ALL, print_help
from probemb.cli.named_paths import split_name
from probemb.cli.ranges import plain, wrong_value
from probemb.cli.yaml_file import Loader, check_keys, load_yaml, read_file
from probemb.errors import UserError, nearest, raise_together

Config = TypeVar("Config")


def parse_config(config_class: type[Config], prog: str, description: str, argv: Sequence[str] | None = None) -> Config:
    """Read `--config file.yaml` and `--group.key value` into a (nested, frozen) dataclass.

    Overrides win over the file, the file over its base (see `read_file`), that over the defaults. Keys may have
    hyphens; a switch without a value is switched on, `--no-KEY` switches off or empties, and a list takes several
    values: `--data a b`. Types give the ranges (`PositiveInt`, `Literal`, …, see probemb.cli.ranges); numbers must be
    finite. A field of `chosen_options` has the options of the class that another field names; those of a file that
    names another class are left out, with a line. `--help` prints the keys in the dataclass' COMMON, if it has any, and
    `--help-all` every key.
    Raises UserError: an unknown key, a value of the wrong type or out of range, a missing or broken file.
    """
    from jsonargparse import ArgumentParser, _loaders_dumpers

    _loaders_dumpers.yaml_default_loader = Loader  # set_loader leaves options of type int and float to YAML 1.1
    lists = [f"--{key}" for key in known_keys(config_class, only=list)]
    typed = _joined(sys.argv[1:] if argv is None else argv, lists)
    whole, choices, elsewhere = _with_chosen(config_class, typed)
    known, switches = known_keys(whole), known_keys(whole, only=bool)
    groups = [key for key in known if any(other.startswith(f"{key}.") for other in known)]
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False)
    help = "a YAML file with any keys; options win over it."
    parser.add_argument("--config", action="config", help=help, metavar="FILE")
    parser.add_class_arguments(whole, as_group=False)
    for action in parser._actions:  # a group takes its keys one by one; a path after --model would be a file of keys
        if action.dest in groups:
            action.help = argparse.SUPPRESS
    if asked := [word for word in typed if word in HELP]:
        print_help(parser, None if HELP_ALL in asked else getattr(whole, "COMMON", ()))
        sys.exit(0)
    files = []
    for path in (Path(word[9:]) for word in typed if _is_file(word)):
        content = _without_other_options(read_file(path), choices, path)
        check_keys(content, path, known, elsewhere)
        files.append(f"--config={yaml.safe_dump(content)}")
    words = [_as_declared(word, known, switches) for word in typed if not _is_file(word)]
    options = [f"--{name}" for name in known if name not in groups]
    keys = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    raise_together(
        elsewhere(key)
        or UserError(
            f"There is no option --{key}.{nearest(f'--{key}', options)}", f"See `{prog} {HELP_ALL}` for all of them."
        )
        for key in keys
        if key not in ("", "print_config") and f"--{key}" not in options
    )
    try:
        return _build(config_class, parser.parse_args(files + words), get_type_hints(whole))
    except UserError:
        raise
    except Exception as error:  # ArgumentError, or whatever a broken YAML file makes jsonargparse raise
        text = re.sub(r"\s+", " ", str(error)).strip().rstrip(".")
        if found := re.match(r'Parser key "([\w.]+)":', text):
            name, value = _said(found[1], typed)
            raise wrong_value(name, _hint(whole, found[1]), value, prog) from error
        what = f"The configuration cannot be read: {text[:400]}."
        raise UserError(what, f"See `{prog} {HELP_ALL}` for its keys.") from error


def chosen_options(by: str, classes: Mapping[str, Any], default: str) -> dict[str, Any]:
    """Arguments of a dataclass' `field` that holds the `Options` of the class that another field names.

    Args:
        by: that other field, at the top of the configuration.
        classes: by name, each with a dataclass `Options`; looked up when it is chosen.
        default: the name whose options stand here when the dataclass is made in code without any.
    """
    choice = {"by": by, "classes": classes, "default": default}
    return {"default_factory": lambda: classes[default].Options(), "metadata": {"chosen": choice}}


def _with_chosen(
    config_class: type, argv: Sequence[str]
) -> tuple[type, dict[str, tuple[str, str, Mapping]], Callable[[str], UserError | None]]:
    """The dataclass with the chosen classes' `Options`; by their fields: the field that chooses, the name and all
    classes; and what to say of a key that only other classes have.
    """
    chosen, others = {}, {}
    for field in dataclasses.fields(config_class):
        if (choice := field.metadata.get("chosen")) is None:
            continue
        by, classes = choice["by"], choice["classes"]
        name = given(by, argv)
        name = choice["default"] if name is None else str(name)
        if name not in classes:
            known = sorted(classes)
            raise UserError(f"There is no {by} '{name}'.{nearest(name, known)}", f"Choose from {', '.join(known)}.")
        chosen[field.name], others[field.name] = classes[name].Options, (by, name, classes)

    def elsewhere(key: str) -> UserError | None:
        group, _, option = key.partition(".")
        if group not in others:
            return None
        by, name, classes = others[group]
        users = ", ".join(one for one in classes if option in known_keys(classes[one].Options))
        remedy = f"Leave it out, or choose one of {users}."
        return UserError(f"The {by} {name} does not use {key}.", remedy) if users else None

    return _resolved(config_class, chosen), others, elsewhere


def _without_other_options(content: dict, choices: dict[str, tuple[str, str, Mapping]], path: Path) -> dict:
    """The content of a file without options of a class that the file names and the run does not use, with a line."""
    for group, (by, name, _) in choices.items():
        if content.get(by, name) == name or not isinstance(options := content.pop(group, None), dict):
            continue
        if os.environ.get("RANK", "0") == "0":
            keys = ", ".join(f"{group}.{key}" for key in options)
            print(f"config  {by} {name} leaves out what {path} sets for {content[by]}: {keys}", file=sys.stderr)
    return content


def _resolved(cls: type, chosen: Mapping[str, type]) -> type:
    """A dataclass with resolved types; jsonargparse would look up their names among all imports of a module."""
    hints, fields = {**get_type_hints(cls), **chosen}, []
    for field in dataclasses.fields(cls):
        hint, default = hints[field.name], field
        if dataclasses.is_dataclass(hint):
            hint = _resolved(hint, {})
            default = dataclasses.field(default_factory=hint)
        fields.append((field.name, hint, default))
    space = {"__module__": __name__, "__doc__": cls.__doc__}
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), namespace=space, frozen=True)


def given(key: str, argv: Sequence[str], files: bool = True, options: bool = True) -> Any:
    """The value of a key in the options, or else in the `--config` files, as YAML reads it; the last one counts, None
    without any. A file that cannot be read is skipped: parsing refuses it. `files`, `options`: whether these count.
    """
    return _said(key, [word for word in _joined(argv) if (files if _is_file(word) else options)])[1]


def _said(key: str, words: Sequence[str]) -> tuple[str, Any]:
    """The name as typed, or the key, and its value: see `given`."""
    for name, equals, value in (word.partition("=") for word in reversed(words)):
        if equals and name.replace("-", "_") == f"__{key}":
            try:
                return name, load_yaml(value)
            except yaml.YAMLError:
                return name, value
    for word in filter(_is_file, reversed(words)):
        try:
            node = read_file(Path(word[9:]))
            for name in key.split("."):
                node = node[name]
            return key, node
        except (OSError, UserError, LookupError, TypeError):
            continue
    return key, None


def _joined(argv: Sequence[str], lists: Sequence[str] = ()) -> list[str]:
    """Every `--key value` as `--key=value`, and `--key a b` of the `lists` as `--key=["a", "b"]`."""
    words: list[str] = []
    several: list[str] = []  # values of the list that stands last
    for word in argv:
        takes_value = words and re.fullmatch("--[^=]+", words[-1], re.DOTALL)
        if word.startswith("--") or not words:
            words.append(word)
            several = []
        elif takes_value:
            several = [word] if words[-1].replace("-", "_").replace("__", "--", 1) in lists else []
            words[-1] += f"={word}"
        elif several:
            several.append(word)
            words[-1] = f"{words[-1].partition('=')[0]}={json.dumps(several)}"
        else:
            words.append(word)
    return words


def _is_file(word: str) -> bool:
    return word.startswith("--config=")


def _as_declared(word: str, known: list[str], switches: list[str]) -> str:
    """`--batch-size=8` as `--batch_size=8`, `--switch` as `--switch=true`, `--no-KEY` as `--KEY=false` or `=null`."""
    if not word.startswith("--"):
        return word
    key, equals, value = word[2:].partition("=")
    key = key.replace("-", "_")
    if key not in known and key.startswith("no_") and key[3:] in known and not equals:
        return f"--{key[3:]}={'false' if key[3:] in switches else 'null'}"
    if key in switches and not equals:
        return f"--{key}=true"
    return "--" + key + equals + value


def known_keys(config_class: type, prefix: str = "", only: type | None = None) -> list[str]:
    """Every dotted key of a nested dataclass, groups included, or only those of one type; `list`: that may be one."""
    keys = []
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        several = only is list and any(get_origin(one) in (list, tuple) for one in (hint, *get_args(hint)))
        if only is None or hint is only or several:
            keys.append(prefix + field.name)
        if dataclasses.is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{field.name}.", only)
    return keys


def _build(cls: type[Config], namespace: Any, hints: dict[str, Any], prefix: str = "") -> Config:
    values = {}
    for field in dataclasses.fields(cls):
        value, hint, key = getattr(namespace, field.name, None), hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            value = _build(hint.__bases__[0], value, get_type_hints(hint), f"{key}.")  # the class before `_resolved`
        else:
            value = plain(value)
            leaves = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(v, float) and not math.isfinite(v) for v in leaves):
                raise wrong_value(key, hint, value)
        values[field.name] = value
    return cls(**values)


def _hint(config_class: type, key: str) -> Any:
    for name in key.split("."):
        config_class = get_type_hints(config_class)[name]
    return config_class


def to_dict(config: Any) -> dict:
    """A dataclass as plain dicts, lists and scalars: what YAML and JSON can hold."""

    def storable(value):
        if isinstance(value, dict):
            return {k: storable(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [storable(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return storable(dataclasses.asdict(config))


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML, in the order of the dataclass; `--config` reads it back from any folder."""
    return yaml.safe_dump(with_absolute_paths(to_dict(config), config), sort_keys=False, allow_unicode=True)


def with_absolute_paths(values: dict, config: Any) -> dict:
    """Copy a configuration (a dict), and make the paths under the keys in `config.PATHS`, if any, absolute.

    Addresses, tags and hub names stay: a model's key is a path only if that path exists. Keys in `config.NAMED_PATHS`
    may hold NAME=PATH.
    """
    values = copy.deepcopy(values)
    for key in getattr(config, "PATHS", ()):
        *groups, name = key.split(".")
        group = values
        for one in groups:
            group = group.get(one) or {}
        value, named = group.get(name), key in getattr(config, "NAMED_PATHS", ())
        if isinstance(value, list):
            group[name] = [_absolute(key, one, named) for one in value]
        elif value:
            group[name] = _absolute(key, value, named)
    return values


def _absolute(key: str, value: str, named: bool) -> str:
    if named and (of := split_name(value)).name:
        return f"{of.name}={_absolute(key, of.path, named=False)}"
    may_be_a_name = key.startswith("model.") and not os.path.exists(value)
    return value if may_be_a_name or re.match(r"[A-Za-z][\w+.-]+:", value) else os.path.abspath(value)
