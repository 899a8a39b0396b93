"""Options as dataclasses: as plain values and YAML, and paths with names of their own."""

import dataclasses
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from probemb.errors import UserError


def to_dict(config: Any) -> dict:
    """A dataclass as plain dicts, lists and scalars: what YAML and JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def flat(values: dict[str, Any], prefix: str = "", whole: Collection[str] = ()) -> dict[str, Any]:
    """By dotted keys; `whole`: those whose values may be dicts."""
    found = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.", whole) if isinstance(value, dict) and key not in whole else {key: value}
    return found


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML, in the order of the dataclass; `--config` reads it back from any folder."""
    return yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True)


def resolved(config: Any) -> dict:
    """`to_dict`, with absolute paths under the keys in `config.PATHS`, if any.

    Addresses, tags and hub names stay: a model's key is a path only if that path exists. Keys in `config.NAMED_PATHS`
    may hold NAME=PATH.
    """
    values = to_dict(config)
    for key in getattr(config, "PATHS", ()):
        *groups, name = key.split(".")
        group, named = values, key in getattr(config, "NAMED_PATHS", ())
        for one in groups:
            group = group.get(one) or {}
        if value := group.get(name):
            paths = [_absolute(key, one, named) for one in ([value] if isinstance(value, str) else value)]
            group[name] = paths[0] if isinstance(value, str) else paths
    return values


def _absolute(key: str, value: str, named: bool) -> str:
    if named and (of := split_name(value)).name:
        return f"{of.name}={_absolute(key, of.path, named=False)}"
    may_be_a_name = key.startswith("model.") and not os.path.exists(value)
    may_be_a_name |= key == "model.name" and not value.endswith(".json")
    return value if may_be_a_name or re.match(r"[A-Za-z][\w+.-]+:", value) else os.path.abspath(value)


class NamedPath(NamedTuple):
    name: str  # empty for a single path that was given without
    path: str  # or an address


def split_name(given: str) -> NamedPath:
    """NAME=PATH in two; a path that exists and has a "=" in it is no name."""
    found = re.fullmatch(r"([\w.-]+)=(.+)", given, re.DOTALL)
    return NamedPath(found[1], found[2]) if found and not os.path.exists(given) else NamedPath("", given)


def named_paths(given: list[str] | str | None, key: str) -> list[NamedPath]:
    """The paths of an option, each with its name; of several, those without one are named as their folders or files.

    Raises UserError: two have the same name, or one has no path.
    """
    found = [split_name(one) for one in ([given] if isinstance(given, str) else given or [])]
    if len(found) > 1:
        stems = [Path(one.path.partition("?")[0]).name.partition(".")[0] for one in found]
        own = [re.sub(r"[^\w-]+", "-", name).strip("-") or "set" for name in stems]
        found = [NamedPath(one.name or name, one.path) for one, name in zip(found, own)]
    names = [one.name for one in found]
    if len(set(names)) < len(names) or not all(one.path.strip() for one in found):
        raise UserError(
            f"Two paths of {key} have one name, or one is empty: {given}.",
            f"Name them apart: --{key} first=PATH second=PATH.",
        )
    return found
