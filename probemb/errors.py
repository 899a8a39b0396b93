"""Errors for the person who typed the command: what is wrong, and what to do about it."""

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module


class UserError(Exception):
    """An error that the person who typed the command can fix."""

    exit_code = 2  # of a command that it ends

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what} {remedy}")
        self.what, self.remedy = what, remedy

    def __reduce__(self):  # two arguments, so that it can leave a worker process
        return type(self), (self.what, self.remedy)


class LostRank(UserError):
    """The end of another rank; the command itself has no fault."""

    exit_code = 1


def raise_together(errors: Iterable[UserError]) -> None:
    errors = list(errors)
    if len(errors) > 1:
        listed = "".join(f"\n- {error.what} {error.remedy}" for error in errors)
        raise UserError(f"{len(errors)} settings cannot work:{listed}", "Change all of them, and start again.")
    for error in errors:
        raise error


def names_of(text: str, known: Iterable[str], what: str) -> list[str]:
    """Names separated by commas, each once. Raises UserError: one that is not `known`, or none."""
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if unknown := [name for name in names or [text] if name not in known]:
        remedy = f"Choose from {', '.join(known)}."
        raise UserError(f"There is no {what} '{unknown[0]}'.{nearest(unknown[0], known)}", remedy)
    return names


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close. The last part of a dotted one
    must be close by itself; `--lr` is meant as the option of a group, and a + as a p (PCME++).
    """
    name, lower = name.lower().replace("+", "p"), {one.lower(): one for one in known}
    last = {one: one.rpartition(".")[2] for one in (name, *lower)}
    found = [one for one in lower if one.startswith("--") and last[one] == last[name].removeprefix("--")]
    near = get_close_matches(name, lower, len(lower) or 1)
    found = found or [one for one in near if get_close_matches(last[name], [last[one]])][:1]
    return f" Did you mean {' or '.join(repr(lower[one]) for one in found)}?" if found else ""


def count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def ended_worker(error: RuntimeError) -> UserError | None:
    """The UserError for PyTorch's report of a dead worker; None for another error."""
    message = " ".join(str(error).split())
    return worker_ended(message[:200].rstrip(".")) if message.startswith("DataLoader worker (pid") else None


def worker_ended(how: str) -> UserError:
    return UserError(
        f"A data worker was ended from outside ({how}).",
        "If memory ran out, use fewer workers or a smaller batch; if /dev/shm is full, or too few files may be open "
        "(ulimit -n), allow more.",
    )


EXTRAS = {  # the optional install of pyproject.toml that has each package
    "deepspeed": "train",
    "tensorboard": "train",
    "img2dataset": "data",
    "pandas": "data",
    "faiss": "search",
    "flask": "search",
    "waitress": "search",
    "submitit": "slurm",
    "transformers": "hf",
    "wandb": "wandb",
    "s3fs": "s3",
}


def not_installed(error: ModuleNotFoundError) -> UserError | None:
    """The UserError for a missing package of an extra; None for another module."""
    name = (error.name or "").partition(".")[0]
    remedy = f"pip install 'probemb[{EXTRAS.get(name)}]', or 'probemb[all]' for every command."
    return UserError(f"This needs the package {name}, which is not installed.", remedy) if name in EXTRAS else None


class Extra:
    """A module of an extra, imported at its first use. Its attributes raise UserError where it is not installed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        try:
            return getattr(import_module(self._name), attribute)
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None


def report(error: UserError) -> None:
    """Print an error in two lines, and leave it to torchrun, whose own report of some forty lines then ends with it."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(3)  # usually all ranks fail alike: rank 0 reports it, and the launcher ends the others
    sentences = (error.what, error.remedy)
    what, remedy = ("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in one) for one in sentences)
    text = f"{f'rank {rank}: ' if rank else ''}error: {what}\n       {remedy}"
    print(text, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(file, "w", encoding="utf-8") as out:
            json.dump({"message": about}, out)
