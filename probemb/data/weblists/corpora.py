"""Published lists of web corpora: rows of an image's address and its caption.

    cc3m      caption TAB address, no header
    cc12m     address TAB caption, no header
    redcaps   one JSON a subreddit and year: {"annotations": [{"url", "caption", "image_id", "subreddit", …}]}

Any of them may be gzipped. Lists are untrusted text: lines and files are bounded, and only http(s) addresses are
accepted (not `file:///etc/passwd`).
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from probemb.data.weblists.markup import clean_caption
from probemb.errors import UserError

MAX_LINE_BYTES = 1 << 20
MAX_JSON_BYTES = 4 << 30
MAX_URL_CHARS = 4096
INSPECTED_LINES = 200  # from which a list of the wrong format is recognised

NO_CAPTION, NO_ADDRESS, NO_ROW, NOT_UTF8 = "no caption", "no http address", "malformed row", "not UTF-8"
KEPT = ("image_id", "subreddit", "score", "created_utc")  # of RedCaps; authors and links to them are dropped


@dataclass(frozen=True)
class Row:
    """An image to fetch: its address, its caption, and further metadata."""

    url: str
    caption: str
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Dropped:
    """An unusable row: its position, and one of NO_CAPTION, NO_ADDRESS, NO_ROW, NOT_UTF8."""

    where: str
    why: str


@dataclass(frozen=True)
class Corpus:
    """A published format. `columns` are those of a table, () for RedCaps' JSON."""

    name: str
    title: str
    columns: tuple[str, ...]
    suffixes: tuple[str, ...]


CORPORA = {
    one.name: one
    for one in (
        Corpus("cc3m", "CC3M", ("caption", "url"), (".tsv", ".tsv.gz")),
        Corpus("cc12m", "CC12M", ("url", "caption"), (".tsv", ".tsv.gz")),
        Corpus("redcaps", "RedCaps", (), (".json", ".json.gz")),
    )
}
Advance = Callable[[int], object]


def find_lists(corpus: str, paths: Iterable[str]) -> list[Path]:
    """The files of a list; a folder stands for its files in the corpus' format, sorted by name.

    Raises UserError: a path that does not exist, or a folder without such files.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(CORPORA[corpus].suffixes) and p.is_file())
            if not inside:
                raise UserError(
                    f"The folder {path} holds no {' or '.join(CORPORA[corpus].suffixes)} file.",
                    f"Name the published list of {CORPORA[corpus].title}, or the folder that it lies in.",
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"The list {path} does not exist.", "Check the path.")
    names = [path.name for path in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"Two lists are called {twice}.", "Name each list once.")
    return found


def read_list(
    corpus: str, path: Path, advance: Advance = lambda n: None, clean: bool = True
) -> Iterator[Row | Dropped]:
    """Rows of one list in their order, unusable ones as `Dropped`.

    Args:
        corpus: a key of CORPORA.
        advance: called with the number of bytes read.
        clean: apply `clean_caption` to captions; otherwise they are only stripped.

    Raises UserError: the file is empty, cannot be read, or is not in this corpus' format.
    """
    caption_of = clean_caption if clean else str.strip
    try:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if _is_gzip(raw) else raw
            rows = _json_rows(file, path) if corpus == "redcaps" else _table_rows(CORPORA[corpus], file, path)
            reported = 0
            for row in rows:
                yield row if isinstance(row, Dropped) else _checked(*row, caption_of)
                if raw.tell() - reported >= 1 << 20:
                    advance(raw.tell() - reported)
                    reported = raw.tell()
            advance(raw.tell() - reported)
    except (OSError, EOFError, gzip.zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read: {reason}.", "Fetch the list again.") from None


def clean_url(text: str) -> str | None:
    """A requestable http(s) address (blanks and non-ASCII characters are quoted), or None."""
    text = re.sub(r"\\x([2-7][0-9a-f])", lambda code: chr(int(code[1], 16)), text.strip())  # "?itok\x3d…", from scripts
    if not text or len(text) > MAX_URL_CHARS or re.search(r"[\x00-\x1f\x7f]", text):
        return None
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # the port raises ValueError where it is none
        if parts.scheme.lower() not in ("http", "https") or not host or "@" in parts.netloc:
            return None
        netloc = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
        path = quote(parts.path, safe="%/:=&~+!$,;'@()*[]|")
        query = quote(parts.query, safe="%/:=&?~+!$,;'@()*[]|")
    except (ValueError, UnicodeError):
        return None
    if re.search(r"[^\w.:\-\[\]]", netloc):
        return None
    return f"{parts.scheme.lower()}://{netloc}{path}{'?' + query if query else ''}"


def _checked(where: str, url: object, caption: object, extra: dict, caption_of: Callable[[str], str]) -> Row | Dropped:
    address = clean_url(url) if isinstance(url, str) else None
    if address is None:
        return Dropped(where, NO_ADDRESS)
    text = caption_of(caption) if isinstance(caption, str) else ""
    text = text.encode(errors="replace").decode()  # half a surrogate pair, from JSON
    return Row(address, text, extra) if text else Dropped(where, NO_CAPTION)


def _table_rows(corpus: Corpus, file: BinaryIO, path: Path) -> Iterator[tuple | Dropped]:
    head: list[tuple[int, bytes]] = []
    lines = _lines(file, path)
    for line in lines:
        head.append(line)
        if len(head) == INSPECTED_LINES:
            break
    _check_format(corpus, [line for _, line in head], path)
    url, caption = corpus.columns.index("url"), corpus.columns.index("caption")
    for group in (head, lines):
        for number, line in group:
            where = f"{path.name}, line {number}"
            try:
                cells = line.decode("utf-8-sig" if number == 1 else "utf-8").split("\t")
            except UnicodeDecodeError:
                yield Dropped(where, NOT_UTF8)
                continue
            if len(cells) != len(corpus.columns):
                yield Dropped(where, NO_ROW)
                continue
            yield where, cells[url], cells[caption], {}


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without line ends; blank lines are skipped."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            raise UserError(f"Line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes.", "Is it a text file?")
        line = line.rstrip(b"\r\n")
        if line.strip():
            yield number, line


def _check_format(corpus: Corpus, head: list[bytes], path: Path) -> None:
    """Refuse a list that is empty or of another format, judged by its first lines."""
    form = " TAB ".join("address" if name == "url" else name for name in corpus.columns)
    if not head:
        raise UserError(f"The list {path} is empty.", f"Name the published list of {corpus.title} ({form} lines).")
    texts = [line.decode("utf-8", "replace").removeprefix("\ufeff") for line in head]
    rows = [text.split("\t") for text in texts]
    fitting = [cells for cells in rows if len(cells) == len(corpus.columns)]
    remedy = f"A {corpus.title} list has a line `{form}` for each image, without a header."
    if 2 * len(fitting) < len(rows):
        if texts[0].lstrip().startswith(("{", "[")):
            seen = "it is JSON"
        elif any(sum(text.count(mark) > 0 for text in texts) * 2 > len(texts) for mark in (",", ";", "|")) and all(
            len(cells) == 1 for cells in rows[:5]
        ):
            seen = "its columns are not separated by tabs"
        else:
            seen = f"its first line has {len(rows[0])} of {len(corpus.columns)} columns"
        raise UserError(f"{path} is not a {corpus.title} list: {seen}.", remedy)
    url = corpus.columns.index("url")
    if 2 * sum(clean_url(cells[url]) is not None for cells in fitting) < len(fitting):
        other = [one for one in CORPORA.values() if one.columns and one.columns != corpus.columns]
        swapped = sum(clean_url(cells[1 - url]) is not None for cells in fitting)
        if 2 * swapped >= len(fitting):
            fits = other[0]
            raise UserError(
                f"{path} has the address in column {2 - url}, as {fits.title} has, not in column {url + 1} as "
                f"{corpus.title}.",
                f"Start the command with {fits.name}.",
            )
        raise UserError(f"{path} is not a {corpus.title} list: column {url + 1} holds no http addresses.", remedy)


def _json_rows(file: BinaryIO, path: Path) -> Iterator[tuple | Dropped]:
    remedy = 'A RedCaps list is SUBREDDIT_YEAR.json: {"annotations": [{"url", "caption", …}, …]}.'
    content = file.read(MAX_JSON_BYTES + 1)
    if not content.strip():
        raise UserError(f"The list {path} is empty.", remedy)
    try:
        if len(content) > MAX_JSON_BYTES:
            raise ValueError("too large")
        rows = json.loads(content)["annotations"]
        if not isinstance(rows, list):
            raise TypeError("annotations")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a RedCaps list.", remedy) from None
    del content
    for number, row in enumerate(rows):
        where = f"{path.name}, annotation {number}"
        if not isinstance(row, dict):
            yield Dropped(where, NO_ROW)
            continue
        extra = {
            name: row[name] for name in KEPT if isinstance(row.get(name), (str, int)) and len(str(row[name])) < 100
        }
        yield where, row.get("url"), row.get("caption"), extra


def _is_gzip(file: BinaryIO) -> bool:
    start = file.read(2)
    file.seek(0)
    return start == b"\x1f\x8b"
