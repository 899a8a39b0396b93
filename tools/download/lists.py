"""Published lists of web corpora: rows of an image's address and its caption.

    cc3m      caption TAB address, no header
    cc12m     address TAB caption, no header
    redcaps   one JSON a subreddit and year: {"annotations": [{"url", "caption", "image_id", "subreddit", …}]}

Any of them may be gzipped. Lists are untrusted text: lines and files are bounded, only http(s) addresses are accepted
(not `file:///etc/passwd`), and captions lose their markup.
"""

import gzip
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, urlsplit

from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

MAX_LINE_BYTES = 1 << 20
MAX_JSON_BYTES = 4 << 30
MAX_URL_CHARS = 4096
INSPECTED_LINES = 200  # from which a list of the wrong format is recognised

NO_CAPTION, NO_ADDRESS, NO_ROW, NOT_UTF8 = "no caption", "no http address", "malformed row", "not UTF-8"
KEPT = ("image_id", "subreddit", "score", "created_utc")  # of RedCaps; authors and links to them are dropped

PERSON = "person"  # the word that CC3M uses for a name
_ANONYMOUS = re.compile(r"<\s*(?:person|usr|user)\s*>|\[\s*(?:PERSON|USR)\s*\]", re.IGNORECASE)
_HIDDEN = re.compile(r"<(script|style)\b[^<>]*>.{0,2000}?</\1\s*>|<!--.{0,2000}?-->", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"</?[a-z][^<>]{0,1000}>|<[!?|][^<>]{0,1000}>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x20\x7f-\xa0\u1680\u2000-\u200b\u2028-\u202f\u205f-\u2069\u3000\ufeff\ud800-\udfff]+")
_PASSES = 10


class Row(NamedTuple):
    """An image to fetch: its address, its caption, and further metadata."""

    url: str
    caption: str
    extra: dict = {}  # noqa: RUF012


class Corpus(NamedTuple):
    """A published format. `columns` are those of a table, () for RedCaps' JSON, of which `kept` are kept."""

    title: str
    columns: tuple[str, ...]
    suffixes: tuple[str, ...]
    kept: tuple[str, ...] = ()


CORPORA = {
    "cc3m": Corpus("CC3M", ("caption", "url"), (".tsv", ".tsv.gz")),
    "cc12m": Corpus("CC12M", ("url", "caption"), (".tsv", ".tsv.gz")),
    "redcaps": Corpus("RedCaps", (), (".json", ".json.gz"), KEPT),
}


def find_lists(corpus: str, paths: Iterable[str]) -> list[Path]:
    """The files of a list; a folder stands for its files in the corpus' format, sorted by name.

    Raises UserError: a path that does not exist, or a folder without such files.
    """
    found, (title, _, suffixes, _) = [], CORPORA[corpus]
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"The list {path} does not exist.", "Check the path.")
        inside = sorted(p for p in path.iterdir() if p.name.endswith(suffixes)) if path.is_dir() else [path]
        if not inside:
            what = f"The folder {path} holds no {' or '.join(suffixes)} file."
            raise UserError(what, f"Name the published list of {title}, or the folder that it lies in.")
        found += inside
    names = [path.name for path in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two lists are called {twice}.", "Name each list once.")
    return found


def read_list(
    corpus: str, path: Path, advance: Callable[[int], object] = lambda n: None, clean: bool = True
) -> Iterator[Row | str]:
    """Rows of one list in their order; of an unusable one the cause, such as NO_CAPTION.

    Args:
        corpus: a key of CORPORA.
        advance: called with the number of bytes read.
        clean: apply `clean_caption` to captions; otherwise they are only stripped.

    Raises UserError: the file is empty, cannot be read, or is not in this corpus' format.
    """
    caption_of = clean_caption if clean else str.strip
    title, columns, *_ = CORPORA[corpus]
    form = " TAB ".join("address" if name == "url" else name for name in columns)
    form = form or 'SUBREDDIT_YEAR.json: {"annotations": [{"url", "caption", …}, …]}'
    wrong = UserError(f"{path} is no {title} list.", f"A {title} list has the form `{form}`, without a header.")
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if zipped else raw
            rows = _table_rows(columns, file, path) if columns else _json_rows(file)
            read = (_checked(row, caption_of) for row in rows)
            head = list(islice(read, INSPECTED_LINES))
            fetchable = sum(isinstance(row, Row) or row == NO_CAPTION for row in head)
            if columns and (not head or 2 * fetchable < len(head)):
                raise wrong
            reported = 0
            for row in chain(head, read):
                yield row
                if raw.tell() - reported >= 1 << 20:
                    advance(raw.tell() - reported)
                    reported = raw.tell()
            advance(raw.tell() - reported)
    except (ValueError, KeyError, TypeError, RecursionError):  # of JSON
        raise wrong from None
    except (OSError, EOFError, gzip.zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read: {reason}.", "Fetch the list again.") from None


def _checked(row: Row | str, caption_of: Callable[[str], str]) -> Row | str:
    if isinstance(row, str):
        return row
    address = clean_url(row.url) if isinstance(row.url, str) else None
    if address is None:
        return NO_ADDRESS
    text = caption_of(row.caption) if isinstance(row.caption, str) else ""
    text = text.encode(errors="replace").decode()  # half a surrogate pair, from JSON
    return Row(address, text, row.extra) if text else NO_CAPTION


def _table_rows(columns: tuple[str, ...], file: BinaryIO, path: Path) -> Iterator[Row | str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
        if len(line) == MAX_LINE_BYTES:
            raise UserError(f"Line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes.", "Is it a text file?")
        if not line.strip():
            continue
        try:
            cells = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8").split("\t")
        except UnicodeDecodeError:
            yield NOT_UTF8
            continue
        yield Row(**dict(zip(columns, cells))) if len(cells) == len(columns) else NO_ROW


def _json_rows(file: BinaryIO) -> Iterator[Row | str]:
    content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError("too large")
    for row in json.loads(content)["annotations"]:
        if not isinstance(row, dict):
            yield NO_ROW
            continue
        known = {name: row.get(name) for name in KEPT}
        extra = {name: one for name, one in known.items() if isinstance(one, (str, int)) and len(str(one)) < 100}
        yield Row(row.get("url"), row.get("caption"), extra)


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


def clean_caption(text: str) -> str:
    """The caption without markup, in one line; "" if nothing is left.

    - `<PERSON>` (CC12M) and `<usr>`, `[USR]` (RedCaps) become "person".
    - Character references are resolved, also doubled ones, and tags removed, until nothing changes: CLIP's tokenizer
      resolves references itself, and a resulting "<end_of_text>" would end the caption there.
    - Control characters, changes of writing direction, line breaks and runs of blanks become one blank; the text is cut
      at 2,000 characters.

    "a < b", "<3" and other lone angle brackets stay. Letters keep their case; the tokenizer lowers them.
    """
    text = text[: 4 * MAX_CAPTION_CHARS]
    for _ in range(_PASSES):
        before = text
        text = _TAG.sub(" ", _HIDDEN.sub(" ", _ANONYMOUS.sub(f" {PERSON} ", html.unescape(text))))
        if text == before:
            break
    else:  # maliciously nested
        text = text.replace("<", " ").replace("&", " ")
    text = _CONTROL.sub(" ", text).strip()
    text = re.sub(rf"(?<={PERSON}) (?=[,.;:!?)])", "", text)  # "<PERSON>, smiling": no blank before the comma
    return text[:MAX_CAPTION_CHARS].strip()
