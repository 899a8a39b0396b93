"""Names of many files from a pattern with braces, as a shell expands it."""

import itertools
import re
from collections.abc import Iterator

from probemb.data.remote.sources import Remote, is_remote
from probemb.errors import UserError

MAX_PATTERN_FILES = 1_000_000


def expand_braces(pattern: str) -> list[str]:
    """Expand {00000..00331} and {a,b} as a shell does. Raises UserError: unbalanced, or too many names."""
    names = list(itertools.islice(_expand_braces(pattern), MAX_PATTERN_FILES + 1))
    if len(names) > MAX_PATTERN_FILES:
        raise UserError(
            f"The data path {_shown(pattern)} stands for more than {MAX_PATTERN_FILES:,} files.", "Narrow the range."
        )
    return names


def _expand_braces(pattern: str) -> Iterator[str]:
    """Generate one name at a time, so that a huge range costs nothing."""
    command = pattern.startswith("pipe:")  # a shell also uses braces otherwise
    braces = re.search(r"(?<!\$)\{([^{}\s]*(?:\.\.|,)[^{}\s]*)\}" if command else r"\{([^{}]*)\}", pattern)
    if braces is None:
        if not command and ("{" in pattern or "}" in pattern):
            raise UserError(
                f"The braces of the data path {_shown(pattern)} do not pair up.",
                "Write a range as in data/cc3m/{00000..00331}.tar.",
            )
        yield pattern
        return
    numbers = re.fullmatch(r"([0-9]{1,12})\.\.([0-9]{1,12})", braces[1])
    if numbers:
        width = len(numbers[1]) if numbers[1].startswith("0") else 1
        options = (f"{number:0{width}d}" for number in range(int(numbers[1]), int(numbers[2]) + 1))
    else:
        options = iter(braces[1].split(","))
    for option in options:
        yield from _expand_braces(pattern[: braces.start()] + option + pattern[braces.end() :])


def _shown(source: str) -> str:
    """The source as typed, without the secrets of an address."""
    return str(Remote(source)) if is_remote(source) else source
