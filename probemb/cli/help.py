"""The help of commands with many options: `--help` is one screen of those that people use, `--help-all` has all."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL, "--help_all")
WIDEST = 120


def print_help(parser: ArgumentParser, common: Sequence[str] = ()) -> None:
    """Print the options in `common`, in its order, a name of a group for all of its keys; without any, every option."""
    parser.usage = f"{parser.prog} [--config FILE] [--KEY VALUE ...]"
    if not common:
        parser.print_help()
        return
    options = {action.dest: action for action in parser._actions if action.help != argparse.SUPPRESS}
    names = [name for one in ("config", *common) for name in options if name == one or name.startswith(f"{one}.")]
    width, left = min(shutil.get_terminal_size().columns, WIDEST), max(map(len, names)) + 6
    lines = [f"usage: {parser.usage}", "", *textwrap.wrap(parser.description, width), ""]
    for name in names:
        said = textwrap.wrap(_describe(options[name]), max(30, width - left))
        lines += [f"  --{name}".ljust(left) + said[0], *(" " * left + line for line in said[1:])]
    rest = len(options) - len(names)
    lines += ["", f"{HELP_ALL} lists {rest} more options. Every one can stand in the file as a key."]
    print("\n".join(lines))


def _describe(action: argparse.Action) -> str:
    default = action.default
    shown = default not in (None, False, [], argparse.SUPPRESS) and "==" not in str(default)
    return re.split(r"; (?![^(]*\))", action.help)[0].rstrip(".") + (f" ({default})" if shown else "")
