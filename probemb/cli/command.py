"""What every command shares: a frozen dataclass read from YAML and dotted overrides, and how errors end a command."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import yaml

from probemb.errors import UserError, nearest

Config = TypeVar("Config")
LARGEST = 1_000_000  # batch, number of candidates and the like: more is a slip
MAX_WORKERS = 512  # each is a process
_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "tuple": "a list",
    "list": "a list",
}  # fmt: skip


def parse_config(config_class: type[Config], prog: str, description: str, argv: Sequence[str] | None = None) -> Config:
    """Read `--config file.yaml` and `--group.key value` into a (nested, frozen) dataclass.

    Overrides win over the file, the file over the dataclass' defaults. Keys may be typed with hyphens; a switch
    without a value is switched on, and `--no-KEY` switches off or empties.

    Raises:
        UserError: an unknown key (names the nearest known one), a value of the wrong type, a missing or broken file.
    """
    from jsonargparse import ArgumentParser

    known, switches = known_keys(config_class), known_keys(config_class, only=bool)
    argv = [_as_declared(word, known, switches) for word in (sys.argv[1:] if argv is None else argv)]
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="A YAML file with any of the keys below; options win over it."
    )
    parser.add_class_arguments(config_class, as_group=False)
    groups = [key for key in known if any(other.startswith(f"{key}.") for other in known)]
    for action in parser._actions:  # a group takes its keys one by one; a path after --model would be a file of keys
        if action.dest in groups:
            action.help = argparse.SUPPRESS
    _refuse_unknown(prog, argv, known, groups)
    argv = [  # `--resume` alone switches on
        f"{word}=true" if word[2:] in switches and (i + 1 == len(argv) or argv[i + 1].startswith("--")) else word
        for i, word in enumerate(argv)
    ]
    try:
        parsed = parser.parse_args(argv)
        return _build(config_class, parsed)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # jsonargparse raises its own ArgumentError and whatever a broken YAML file makes it raise
        text = re.sub(r"\s+", " ", str(error)).strip().rstrip(".")
        wrong = re.match(r'Parser key "([\w.]+)":.*?<class \'(\w+)\'>.* (?:Got|Given) value: (.*)', text)
        what = f"The configuration cannot be read: {text[:400]}."
        if wrong:
            what = f"{wrong[1]} is '{wrong[3][:100]}', which is not {_TYPES.get(wrong[2], wrong[2])}."
        raise UserError(what, f"See `{prog} --help` for what it takes.") from error


def _as_declared(word: str, known: list[str], switches: list[str]) -> str:
    """`--batch-size=8` as `--batch_size=8`, and `--no-KEY` as `--KEY=false` or `--KEY=null`."""
    if not word.startswith("--"):
        return word
    key, equals, value = word[2:].partition("=")
    key = key.replace("-", "_")
    if key not in known and key.startswith("no_") and key[3:] in known and not equals:
        return f"--{key[3:]}={'false' if key[3:] in switches else 'null'}"
    return "--" + key + equals + value


def known_keys(config_class: type, prefix: str = "", only: type | None = None) -> list[str]:
    """Every dotted key of a nested dataclass, groups included, or only those of one type."""
    keys = []
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if only is None or hint is only:
            keys.append(prefix + field.name)
        if dataclasses.is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{field.name}.", only)
    return keys


def _refuse_unknown(prog: str, argv: list[str], known: list[str], groups: list[str]) -> None:
    for i, word in enumerate(argv):
        if not word.startswith("--") or word == "--":
            continue
        key, _, value = word[2:].partition("=")
        if key in ("help", "config", "print_config"):
            path = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if key == "config" and path:
                _refuse_unknown_in_file(Path(path), known)
            continue
        if key not in known or key in groups:
            options = [f"--{name}" for name in known if name not in groups]
            raise UserError(
                f"There is no option --{key}.{nearest(f'--{key}', options)}", f"See `{prog} --help` for all of them."
            )


def _refuse_unknown_in_file(path: Path, known: list[str]) -> None:
    if not path.is_file():
        raise UserError(f"The configuration file {path} does not exist.", "Check the path given to --config.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not a YAML file: {' '.join(str(error).split())[:300]}.", "Correct the file."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys.", "Write one `key: value` a line; --help lists the keys.")

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key not in known:
                raise UserError(
                    f"{path} sets the unknown key {key}.{nearest(key, known)}", "Correct or remove that line."
                )
            if isinstance(value, dict) and any(k.startswith(f"{key}.") for k in known):
                walk(value, f"{key}.")

    walk(content, "")


def _build(cls: type[Config], namespace: Any) -> Config:
    hints = get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        value = getattr(namespace, field.name)
        values[field.name] = _build(hints[field.name], value) if dataclasses.is_dataclass(hints[field.name]) else value
    return cls(**values)


def to_dict(config: Any) -> dict:
    """A dataclass as plain dicts, lists and scalars: what YAML and JSON can hold."""

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML, in the order of the dataclass; `--config` reads it back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def check_numbers(config: Any, from_one: Sequence[str] = ("batch_size", "text_batch_size", "k")) -> None:
    """Refuse numbers out of range, before anything is read; options that a command does not have are passed over.

    Raises:
        UserError: names the option.
    """
    for name in from_one:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number from 1 on.")
        if value is not None and value > LARGEST:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", f"Give at most {LARGEST:,}.")
    if config.workers is not None and not 0 <= config.workers <= MAX_WORKERS:
        raise UserError(f"--workers is {config.workers}.", f"Give 0 to {MAX_WORKERS}.")
    if not getattr(config, "temperature", 1.0) > 0:
        raise UserError(f"--temperature is {config.temperature}.", "Give a number above 0.")
    if not 0 <= config.max_bad <= 1:
        raise UserError(f"--max-bad is {config.max_bad}.", "Give a share between 0 and 1.")


class Parser(argparse.ArgumentParser):
    """argparse for commands with a handful of options, whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}.", f"See `{self.prog} --help` for what it takes.")


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and leave with its exit code; a UserError ends in two lines on stderr and exit code 2.

    Set PROBEMB_TRACEBACK=1 to see where an error was raised.
    """
    try:
        code = main() or 0
    except (UserError, RuntimeError) as error:
        if not isinstance(error, UserError):
            from probemb.data.workers import ended_worker

            if (told := ended_worker(error)) is None:
                raise
            error = told
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of workers that end from now on PyTorch would tell again
        if os.environ.get("PROBEMB_TRACEBACK"):
            traceback.print_exc()
        if rank := int(os.environ.get("RANK", "0")):
            time.sleep(3)  # usually all ranks fail alike: rank 0 says it, and the launcher ends the others meanwhile
            print(f"rank {rank}: ", end="", file=sys.stderr)
        told = (error.what, error.remedy)
        what, remedy = ("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text) for text in told)
        print(f"error: {what}\n       {remedy}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        exec("")  # else Python, where the signal came in code of a string (a dataclass is one), forgets our exit code
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
