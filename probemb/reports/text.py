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


def signed(value: float | None) -> str:
    """+0.12, −0.12, or "undefined"."""
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def between(estimate: dict[str, float] | None, signed: bool = False) -> str:
    """{"value", "low", "high"} as "0.173 [0.158, 0.190]"; empty for None, "undefined" for NaN."""
    if estimate is None:
        return ""
    value, low, high = (
        f"{estimate[key]:{'+' if signed else ''}.3f}".replace("-", "\N{MINUS SIGN}") for key in ("value", "low", "high")
    )
    return "undefined" if value.endswith("nan") else f"{value} [{low}, {high}]"
