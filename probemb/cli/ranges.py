"""Types of options with bounds, beside jsonargparse's own (PositiveInt, ClosedUnitInterval, …)."""

import re
from typing import Any, Literal, get_args, get_origin

from jsonargparse.typing import restricted_number_type, restricted_string_type

from probemb.errors import UserError, nearest

MANY = 4096  # processes or threads; more are a typing error
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)])
Workers = restricted_number_type("Workers", int, [(">=", 0), ("<=", MANY)])  # processes; 0 for this one alone
Threads = Workers  # 0 chooses a number
Processes = restricted_number_type("Processes", int, [(">=", 1), ("<=", MANY)])
Requests = Processes  # threads that wait for the network
Count = restricted_number_type("Count", int, [(">=", 1), ("<=", 1_000_000)])  # of a batch: more is a typing error
Passes = restricted_number_type("Passes", float, [(">=", 0), ("<=", 1_000_000)])  # over the data
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

KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
BOUNDS = {">": "above", ">=": "of at least", "<": "below", "<=": "at most"}


def takes(hint: Any) -> str:
    """The values that a type takes, in short: "a whole number of at least 0 and at most 64", "csd or elk"."""
    options = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, options))
    if get_origin(hint) in (list, tuple):
        kinds = " or ".join(dict.fromkeys(takes(one) for one in options if one is not Ellipsis))
        return f"a list, each {kinds} (1 2 on the command line, [1, 2] in a file)"
    if get_origin(hint) is dict:
        return f"{{name: {takes(options[1])}, …}}"
    if options:
        return " or ".join(map(takes, options))
    if hint is Folder:
        return "the name of a folder"
    bounds = re.sub("v([<>]=?)", lambda found: f"{BOUNDS[found[1]]} ", getattr(hint, "_expression", ""))
    kind = KINDS.get(getattr(hint, "_type", hint), getattr(hint, "__name__", hint))
    return f"{kind} {bounds}".rstrip()


def wrong_value(name: str, value: Any, hint: Any) -> UserError:
    """The error for a value that an option does not take."""
    choices = [str(c) for one in (hint, *get_args(hint)) if get_origin(one) is Literal for c in get_args(one)]
    return UserError(f"{name} is '{str(value)[:100]}'.{nearest(str(value), choices)}", f"It takes {takes(hint)}.")


def plain(value: Any) -> Any:
    """Numbers and texts of jsonargparse's types as plain ones, which YAML and JSON can hold."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value
