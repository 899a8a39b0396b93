"""Command lines with few options, and the errors that end every command."""

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from probemb.cli.ranges import plain, wrong_value
from probemb.errors import UserError, ended_worker, nearest, not_installed, report


class Parser(argparse.ArgumentParser):
    """argparse with the types of probemb.cli.ranges, whose errors are `UserError`s."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
        if action.type is Path and not arg_string.strip():  # Path would make the working directory of it
            raise UserError(f"{name} is empty.", "Give a path; the working directory is called `.`.")
        try:
            return plain(super()._get_value(action, arg_string))
        except argparse.ArgumentError:
            raise wrong_value(name, arg_string, action.type) from None

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", message)
        hint = nearest(unknown[1], self._option_string_actions) if unknown else ""
        raise UserError(f"{message[:1].upper()}{message[1:]}.{hint}", f"See `{self.prog} --help` for what it takes.")


class _Unfailing:
    """A text stream that drops what cannot be written: to a full disk, or to a reader that exited, as `| head` does."""

    def __init__(self, stream):
        self._stream = stream
        self.lost: OSError | None = None  # the error that dropped text, unless a reader exited

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, step: Callable) -> None:
        try:
            step()
        except BrokenPipeError:
            pass
        except OSError as error:
            self.lost = error

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def make_output_unfailing() -> None:
    """Make stdout and stderr drop text instead of raising; also when closed (`>&-`), or if the encoding lacks some."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, and the next file to be opened would take its descriptor
            stream = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream if isinstance(stream, _Unfailing) else _Unfailing(stream))


def require_output() -> None:
    """Raise UserError if an answer on stdout was lost, as on a full disk."""
    sys.stdout.flush()
    if lost := getattr(sys.stdout, "lost", None):
        raise UserError(f"The output cannot be written ({lost.strerror}).", "Free some space, and repeat the command.")


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and leave with its exit code; a UserError ends in two lines on stderr and its exit code, 2."""
    make_output_unfailing()
    try:
        code = main() or 0
    except (UserError, RuntimeError, ModuleNotFoundError) as error:
        told = error
        if not isinstance(error, UserError):
            told = not_installed(error) if isinstance(error, ModuleNotFoundError) else ended_worker(error)
        if told is None:
            raise
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else PyTorch would report ended workers once more
        report(told)
        code = told.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        exec("")  # else Python, where the signal came in code of a string (a dataclass is one), forgets our exit code
        code = 130
    sys.exit(code)
