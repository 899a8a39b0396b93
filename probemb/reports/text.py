"""Numbers and untrusted text for pages and figures."""

import re
from urllib.parse import urlsplit

MAX_LINK = 2_000  # characters


def printable(text: object) -> str:
    """Untrusted text with control characters, lone surrogates and changes of writing direction replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def web_link(address: object) -> str | None:
    """An untrusted address that may become a link, else None: http or https, printable, without a user name."""
    if not isinstance(address, str) or len(address) > MAX_LINK or not address.isprintable():
        return None
    if not re.fullmatch(r"https?://[^\s\\\"<>^`{|}]+", address, re.IGNORECASE):
        return None
    try:
        parts = urlsplit(address)
        return address if parts.hostname and "@" not in parts.netloc and parts.port != 0 else None
    except ValueError:  # an invalid port or IPv6 address
        return None


def number(value: float) -> str:
    """Short: 12, 0.25, 1.3e-05."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """0.1234 as "12.34"."""
    return f"{100 * share:.2f}"


def between(estimate: dict[str, float] | None, signed: bool = False) -> str:
    """{"value", "low", "high"} as "0.173 [0.158, 0.190]"; empty for None, "undefined" for NaN."""
    if estimate is None:
        return ""
    form = "+.3f" if signed else ".3f"
    value, low, high = (f"{estimate[key]:{form}}".replace("-", "\N{MINUS SIGN}") for key in ("value", "low", "high"))
    return "undefined" if value.endswith("nan") else f"{value} [{low}, {high}]"


def plus_minus(estimate: dict | None, scale: float = 100, digits: int = 2, signed: bool = False) -> str:
    """{"value", "se"} as "51.20 ± 0.43"; "" for None."""
    if not estimate:
        return ""
    se = "" if estimate["se"] is None else f" ± {scale * estimate['se']:.{digits}f}"
    return f"{scale * estimate['value']:{'+' if signed else ''}.{digits}f}{se}"


def correlations(bins: dict) -> str:
    pearson, spearman = ("undefined" if x is None else f"{x:+.2f}" for x in (bins["pearson"], bins["spearman"]))
    return f"Pearson {pearson} over bins; Spearman {spearman} over single items."
