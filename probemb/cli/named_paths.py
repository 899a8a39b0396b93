"""Paths with names of their own, as options take them: PATH, or NAME=PATH."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from probemb.errors import UserError

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


class NamedPath(NamedTuple):
    """A path or address; the name is empty for a single one that was given without."""

    name: str
    path: str


def split_name(given: str) -> NamedPath:
    """NAME=PATH in two; a path that exists and has a "=" in it is no name."""
    found = _NAMED.fullmatch(given)
    return NamedPath(found[1], found[2]) if found and not os.path.exists(given) else NamedPath("", given)


def named_paths(given: list[str] | str | None, key: str) -> list[NamedPath]:
    """The paths of an option, each with its name; of several, those without one are named as their folders or files.

    Raises:
        UserError: two have the same name, or one has no path.
    """
    found = [split_name(one) for one in ([given] if isinstance(given, str) else given or [])]
    if len(found) > 1:
        found = [NamedPath(one.name or _own_name(one.path), one.path) for one in found]
    refuse_same_names([one.name for one in found], key)
    if not all(one.path.strip() for one in found):
        raise UserError(f"A path of {key} is empty.", "Name a path, or leave the option out.")
    return found


def refuse_same_names(names: list[str], key: str) -> None:
    """Raises UserError: two paths of an option have the same name."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two paths of {key} are named '{twice}'.", f"Name them apart: --{key} first=PATH second=PATH.")


def _own_name(path: str) -> str:
    """The last part of a path or address that is a name, without its endings; "set" if there is none."""
    own = re.sub(r"[^\w-]+", "-", Path(path.partition("?")[0]).name.partition(".")[0]).strip("-")
    return own or "set"
