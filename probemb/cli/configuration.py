"""A command's configuration: a frozen dataclass read from YAML files and dotted options by jsonargparse."""

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml

from probemb.cli.ranges import plain, takes, wrong_value
from probemb.errors import UserError, nearest, raise_together
from probemb.options import flat

Config = TypeVar("Config")
HELP, HELP_ALL = ("h", "help", "help_all"), "--help-all"


class _Yaml(yaml.SafeLoader):
    """Reads 010 and 1:20 as text, as options do; to YAML 1.1 they are 8 and 80."""


_WHOLE = re.compile(r"-?(0|[1-9]\d*)")
_Yaml.add_constructor(
    "tag:yaml.org,2002:int", lambda _, node: int(node.value) if _WHOLE.fullmatch(node.value) else node.value
)


class Option(NamedTuple):
    hint: Any  # its type
    default: Any
    text: str  # from the dataclass' docstring


def parse_config(config_class: type[Config], prog: str, description: str, argv: Sequence[str] | None = None) -> Config:
    """Read `--config file.yaml` and `--group.key value` into a (nested, frozen) dataclass.

    Options win over files, later files over earlier ones, a file over the one that its `base` names, and all over the
    defaults. Keys may have hyphens; a switch without a value is switched on, `--no-KEY` switches off or empties, as
    `--KEY ""` does, and a list takes several values: `--data a b`. `--help` prints the keys in the dataclass' COMMON,
    if it has any, and `--help-all` every key. Raises UserError: unknown keys and wrong values, all at once; a missing
    or broken file.
    """
    words = _words(sys.argv[1:] if argv is None else argv)
    config, chosen = config_class(), {}
    whole = [key for key, one in _options(config).items() if dict in map(get_origin, (one.hint, *get_args(one.hint)))]
    files = [(path, read_file(path, whole)) for path in _files(words)]
    for field in (field for field in dataclasses.fields(config_class) if "chosen" in field.metadata):
        by, classes = field.metadata["chosen"]
        name = str(_last(by, words, [content for _, content in files]) or getattr(config, by))
        if name not in classes:
            raise UserError(f"There is no {by} '{name}'.{nearest(name, classes)}", f"Choose from {', '.join(classes)}.")
        chosen[field.name] = by, name, classes
        config = dataclasses.replace(config, **{field.name: classes[name]()})
    options = _options(config)
    if asked := [key for key, _ in words if key in HELP]:
        _print_help(prog, description, options, () if HELP[-1] in asked else getattr(config, "COMMON", ()))
        sys.exit(0)

    faults, values = [], {}
    for path, content in files:
        for key, value in _of_this_class(content, chosen, path).items():
            if key in options:
                values[key] = value
            else:
                what = f"{path} sets the unknown key {key}.{nearest(key, options)}"
                faults.append(_unknown(key, chosen, what, "Correct or remove that line."))
    for key, value in words:
        off = key.removeprefix("no_")
        if key in options and (value is not None or options[key].hint is bool):
            values[key] = True if value is None else value
        elif key in options:
            faults.append(UserError(f"--{key} has no value.", f"See `{prog} --help`."))
        elif off in options and value is None:
            values[off] = False if options[off].hint is bool else None
        elif key != "config":
            what = f"There is no option --{key}.{nearest(f'--{key}', [f'--{one}' for one in options])}"
            faults.append(_unknown(key, chosen, what, f"See `{prog} {HELP_ALL}`."))
    parsed = _parse(values, options, faults)
    raise_together(faults)
    return _build(config, parsed)


def chosen_options(by: str, classes: Mapping[str, Any], default: str) -> dict[str, Any]:
    """Arguments of a dataclass' `field` that holds the one of the dataclasses `classes` that the field `by` names."""
    return {"default_factory": lambda: classes[default](), "metadata": {"chosen": (by, classes)}}


def given(key: str, argv: Sequence[str], files: bool = True, options: bool = True) -> Any:
    """The value of a key in the options, or else in the `--config` files, where these count; None without any."""
    words = _words(argv)
    return _last(key, words if options else [], [read_file(path) for path in _files(words)] if files else [])


def read_file(path: Path, whole: Collection[str] = ()) -> dict:
    """The dotted keys of a YAML file, on top of those of the file that its `base` names, relative to it; values of the
    keys `whole` may be dicts.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Yaml)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"The configuration file {path} cannot be read: {reason}.", "Check --config.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys.", "Write one `key: value` a line; --help lists the keys.")
    base = content.pop("base", None)
    return (read_file(path.parent / base, whole) if base else {}) | flat(content, whole=whole)


def _words(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """(key, value) of every option; the value is a list if there are several, and None without any."""
    words: list[tuple[str, Any]] = []
    for word in argv:
        if word.startswith("-") and not re.match(r"-[\d.]", word):
            key, equals, value = word.lstrip("-").partition("=")
            words.append((key.replace("-", "_"), value if equals else None))
        elif not words:
            raise UserError(f"'{word}' is no option.", "Options begin with --.")
        else:
            key, before = words[-1]
            value = word if before is None else [*(before if isinstance(before, list) else [before]), word]
            words[-1] = key, value
    return words


def _files(words: Sequence[tuple[str, Any]]) -> list[Path]:
    named = [value if isinstance(value, list) else [value or ""] for key, value in words if key == "config"]
    return [Path(path) for paths in named for path in paths]


def _last(key: str, words: Sequence[tuple[str, Any]], contents: Sequence[dict]) -> Any:
    """The value of a key in the words, or else in the contents of files."""
    found = [content[key] for content in contents if content.get(key) is not None]
    found += [yaml.load(value, _Yaml) if isinstance(value, str) else value for name, value in words if name == key]
    return found[-1] if found else None


def _of_this_class(content: dict, chosen: Mapping[str, tuple], path: Path) -> dict:
    """The content without options of a class that the file names and the run does not use; these are told."""
    for group, (by, name, _) in chosen.items():
        left = [key for key in content if key.startswith(f"{group}.") and content.get(by, name) != name]
        if left and os.environ.get("RANK", "0") == "0":
            told = f"{by} {name} leaves out what {path} sets for {content[by]}: {', '.join(left)}"
            print(f"config  {told}", file=sys.stderr)
        content = {key: value for key, value in content.items() if key not in left}
    return content


def _unknown(key: str, chosen: Mapping[str, tuple], what: str, remedy: str) -> UserError:
    """The error for an unknown key, which another class than the chosen one may have."""
    group, _, option = key.partition(".")
    by, name, classes = chosen.get(group, ("", "", {}))
    users = [one for one in classes if option in {field.name for field in dataclasses.fields(classes[one])}]
    if users:
        what, remedy = f"The {by} {name} does not use {key}.", f"Leave it out, or choose one of {', '.join(users)}."
    return UserError(what, remedy)


def _options(config: Any, prefix: str = "") -> dict[str, Option]:
    hints, texts, found = get_type_hints(type(config)), docstring_texts(type(config)), {}
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= _options(value, f"{key}.")
        else:
            found[key] = Option(hints[field.name], value, texts.get(field.name, ""))
    return found


def docstring_texts(cls: type) -> dict[str, str]:
    """Descriptions of a dataclass' fields, from docstrings, in which "{package.module.TABLE}" becomes that's keys."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        arguments = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        for key, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", arguments, re.MULTILINE):
            texts[key] = re.sub(r"\{([\w.]+)\.(\w+)\}", _keys, " ".join(text.split()))
    return texts


def _keys(named: re.Match) -> str:
    """Keys of a table from the source of its module, which may take seconds to import."""
    source = Path(find_spec(named[1]).origin).read_text(encoding="utf-8")
    rows = re.search(rf"^{named[2]}\b.*?= {{\n(.*?)^}}", source, re.MULTILINE | re.DOTALL)[1]
    return ", ".join(re.findall(r'^    "(.+?)": ', rows, re.MULTILINE))


def _parse(values: dict[str, Any], options: Mapping[str, Option], faults: list[UserError]) -> dict[str, Any]:
    """The values as their options' types, or the defaults; appends an error for each wrong value."""
    from jsonargparse import ArgumentError, ArgumentParser

    parsed = {key: option.default for key, option in options.items()}
    for key, value in values.items():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--{key}", type=options[key].hint)
        try:
            value = None if value == "" and type(None) in get_args(options[key].hint) else value
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            parsed[key] = plain(parser.parse_args([f"--{key}={text}"])[key])
        except ArgumentError:
            faults.append(wrong_value(key, value, options[key].hint))
    return parsed


def _build(config: Config, parsed: Mapping[str, Any], prefix: str = "") -> Config:
    values = {}
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        values[field.name] = _build(value, parsed, f"{key}.") if dataclasses.is_dataclass(value) else parsed[key]
    return dataclasses.replace(config, **values)


def _print_help(prog: str, description: str, options: Mapping[str, Option], common: Sequence[str]) -> None:
    """Print the options in `common`, in its order, a group for all of its keys; all where it is empty."""
    names = [name for one in common or options for name in options if name == one or name.startswith(f"{one}.")]
    more = f"{HELP_ALL} lists {len(options) - len(names)} more options. " * bool(common)
    parser = argparse.ArgumentParser(
        usage=f"{prog} [--config FILE] [--KEY VALUE ...]",
        description=description,
        epilog=f"{more}Every option can also be a key in the file that --config names.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36),
        add_help=False,
    )
    for name in names:
        default, text = options[name].default, options[name].text
        text = (re.split(r"; (?![^(]*\))", text)[0] if common else f"{text} [{takes(options[name].hint)}]").rstrip(".")
        text += f" ({default})" if default not in (None, False, "", [], ()) else ""
        parser.add_argument(f"--{name}", metavar="", help=text.replace("%", "%%"))
    parser.print_help()
