"""Ranges of options as jsonargparse's types, beside its own (PositiveInt, ClosedUnitInterval, …), and their errors."""

from typing import Any, Literal, get_args, get_origin

from jsonargparse.typing import restricted_number_type, restricted_string_type

from probemb.cli.machine import COMPUTING, WAITING, describe_cores
from probemb.errors import UserError, nearest

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)])
Workers = restricted_number_type("Workers", int, [(">=", 0), ("<=", COMPUTING)])  # processes; 0 for this one alone
Threads = Workers  # 0 chooses a number
Processes = restricted_number_type("Processes", int, [(">=", 1), ("<=", COMPUTING)])
Requests = restricted_number_type("Requests", int, [(">=", 1), ("<=", WAITING)])  # threads that wait for the network
Count = restricted_number_type("Count", int, [(">=", 1), ("<=", 1_000_000)])  # of a batch: more is a typing error
Passes = restricted_number_type("Passes", float, [(">=", 0), ("<=", 1_000_000)])  # over the data
Dimensions = restricted_number_type("Dimensions", int, [(">=", 1), ("<=", 2**20)])
Gibibytes = restricted_number_type("Gibibytes", float, [(">", 0), ("<=", 1_000_000)])
Minutes = restricted_number_type("Minutes", float, [(">", 0), ("<=", 60 * 24 * 365)])
Share = restricted_number_type("Share", float, [(">", 0), ("<=", 1)])
BelowOne = restricted_number_type("BelowOne", float, [(">=", 0), ("<", 1)])
BelowHalf = restricted_number_type("BelowHalf", float, [(">=", 0), ("<", 0.5)])

Folder = restricted_string_type("Folder", r"[^\0]*[^\s\0][^\0]*", "the name of a folder")

Distance = Literal[
    "csd", "kl", "min-kl", "symmetric-kl", "wasserstein2", "elk", "bhattacharyya", "match-probability"
]  # fmt: skip
Precision = Literal["auto", "fp32", "bf16"]
Resize = Literal["tensor", "pil"]

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list"}
_KINDS[list] = _KINDS[tuple]
_UNITS = {Minutes: "a number of minutes", Gibibytes: "a number of GiB", Folder: "the name of a folder"}
_OF_MACHINE = (Workers, Processes, Requests)
_COMPARED = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def describe(hint: Any) -> str:
    """Description of the values that a type takes: "a number above 0", "csd, kl or elk"."""
    choices = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is Literal:
        return f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
    if get_origin(hint) is tuple and Ellipsis not in choices:
        return f"a list of {len(choices)}, each {describe(choices[0])}"
    if get_origin(hint) in (tuple, list):
        return f"a list, each of it {describe(choices[0])}"
    if choices:
        return describe(choices[0])
    bounds = []
    for compare, limit in getattr(hint, "_restrictions", ()):
        if hint._type is int and compare.__name__ in ("gt", "lt"):  # whole numbers have a first and a last one
            compare, limit = ("ge", limit + 1) if compare.__name__ == "gt" else ("le", limit - 1)
        else:
            compare = compare.__name__
        bounds.append(_COMPARED[compare].format(f"{limit:,}"))
    if len(bounds) == 2 and not bounds[1].startswith("to"):
        bounds[1] = f"to {bounds[1]}"
    if len(bounds) == 1 and bounds[0].startswith("from"):
        bounds.append("on")
    if hint in _OF_MACHINE:
        bounds.append(f"({describe_cores()})")
    return " ".join([_UNITS.get(hint) or _KINDS.get(base_type(hint), str(hint)), *bounds])


def base_type(hint: Any) -> type:
    """int for PositiveInt, str for `str | None`, and so on."""
    choices = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) in (tuple, list):
        return get_origin(hint)
    if choices and get_origin(hint) is not Literal:
        return base_type(choices[0])
    return getattr(hint, "_type", hint)


def plain(value: Any) -> Any:
    """Numbers and texts of jsonargparse's types as plain ones, which YAML and JSON can hold."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value


def wrong_value(key: str, hint: Any, value: Any, prog: str = "the command") -> UserError:
    """The error for a `value`, as typed or read, that the type `hint` of a dotted `key` does not take."""
    kind = base_type(hint)
    shown = f"'{value[:100]}'" if isinstance(value, str) else str(value)[:100]
    if Folder in (hint, *get_args(hint)) and not str(value or "").strip():
        return UserError(f"{key} is empty.", "Name the folder that is to be written, or leave the option out.")
    if value is None:
        return UserError(f"{key} is empty.", f"Set it to {describe(hint)}.")
    if get_origin(hint) is Literal or any(get_origin(one) is Literal for one in get_args(hint)):
        choices = [str(c) for one in (hint, *get_args(hint)) if get_origin(one) is Literal for c in get_args(one)]
        return UserError(f"{key} is {shown}.{nearest(str(value), choices)}", f"Choose {describe(hint)}.")
    if kind in (int, float):
        try:
            number = kind(value)
            if isinstance(value, bool) or (isinstance(value, float) and kind is int and not value.is_integer()):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            return UserError(
                f"{key} is {shown}, which is not {_KINDS[kind]}.", f"Set it to {describe(hint)}; see `{prog} --help`."
            )
        return UserError(f"{key} is {number}.", f"Set it to {describe(hint)}.")
    remedy = f"See `{prog} --help` for what it takes."
    if kind is tuple and not isinstance(value, list):
        remedy = "Give several values: 1 2 on the command line, [1, 2] in a file."
    return UserError(f"{key} is {shown}, which is not {describe(hint)}.", remedy)


def refuse_long_warmup(key: str, warmup: float, run: float, unit: str, lr: float) -> None:
    """Refuse a warm-up of the learning rate that is longer than the run. Raises UserError."""
    if warmup > run:
        raise UserError(
            f"{key} is {warmup:,}, and the run has {run:,} {unit}: its learning rate would end at "
            f"{lr * run / warmup:.1e}, {run / warmup:.2g} of the peak of {lr:.1e}.",
            f"Set {key} to at most {run:,}, or train longer.",
        )
