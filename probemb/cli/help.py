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


def print_help(parser: ArgumentParser, common: Sequence[str] | None = None) -> None:
    """Print the options in `common`, in its order, a name of a group for all of its keys; every option where it is
    empty. None prints all with their types and everything that is said about them.
    """
    parser.usage = f"{parser.prog} [--config FILE] [--KEY VALUE ...]"
    if common is None:
        parser.print_help()
        return
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    options = {action.dest: action for action in shown if action.dest not in ("help", "print_config")}
    wanted = ("config", *common) if common else options
    names = [name for one in wanted for name in options if name == one or name.startswith(f"{one}.")]
    width, left = min(shutil.get_terminal_size().columns, WIDEST), max(map(len, names)) + 6
    lines = [*textwrap.wrap(f"usage: {parser.usage}", width, subsequent_indent=" " * 7, break_on_hyphens=False), ""]
    for paragraph in parser.description.split("\n"):
        lines += textwrap.wrap(paragraph, width, subsequent_indent="    " if paragraph[0] == " " else "")
    lines.append("")
    for name in names:
        said = textwrap.wrap(_describe(options[name]), max(30, width - left)) or [""]
        lines += [f"  --{name}".ljust(left) + said[0], *(" " * left + line for line in said[1:])]
    more = f"lists {len(options) - len(names)} more options" if common else "says more, with the types"
    lines += ["", f"{HELP_ALL} {more}. Every option can also be a key in the file."]
    print("\n".join(lines))


def _describe(action: argparse.Action) -> str:
    default = action.default
    shown = default not in (None, False, "", [], argparse.SUPPRESS) and "==" not in str(default)
    return re.split(r"; (?![^(]*\))", action.help or "")[0].rstrip(".") + (f" ({default})" if shown else "")
