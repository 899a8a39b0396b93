"""Words: splitting texts, vocabulary files, and word vectors in GloVe's text format.

A vocabulary file is UTF-8 with one word a line, the most frequent first, each optionally followed by a tab and its
count. A word is a run of lower-case ASCII letters and digits, possibly with an ending such as "'s".
"""

import gzip
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from probemb.data.remote.sources import is_remote
from probemb.errors import UserError
from probemb.files import replace_file

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
MAX_CHARACTERS = 4096  # of a text that is read
MAX_WORD = 128  # characters of a word; longer ones are cut, and are then unknown
MAX_WORDS = 2_000_000  # of a vocabulary
MAX_LINE = 1 << 20  # bytes of a file of vectors
MAX_VOCABULARY_BYTES = 1 << 28
VOCABULARY = "vocabulary.txt"
_BUILD = "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`."


def split_words(text: str, most: int | None = None) -> list[str]:
    """The words of a text in lower case, at most `most` of them."""
    words: list[str] = []
    for match in WORD.finditer(text[:MAX_CHARACTERS].lower()):
        if len(words) == most:
            break
        words.append(match.group()[:MAX_WORD])
    return words


def frequent_words(counts: Counter[str], min_count: int = 1, max_words: int | None = None) -> list[tuple[str, int]]:
    """(word, count) with at least `min_count` occurrences, the most frequent first, ties in alphabetical order."""
    kept = sorted((item for item in counts.items() if item[1] >= min_count), key=lambda item: (-item[1], item[0]))
    return kept[:max_words]


def count_words(texts: Iterable[str], counts: Counter[str] | None = None) -> Counter[str]:
    """The number of occurrences of each word; added to `counts` if given."""
    counts = Counter() if counts is None else counts
    for text in texts:
        counts.update(split_words(text))
    return counts


def write_vocabulary(path: str | Path, words: Iterable[tuple[str, int]]) -> None:
    """Write a vocabulary file atomically. Raises OSError."""
    text = "".join(f"{word}\t{count}\n" for word, count in words)
    replace_file(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


def read_vocabulary(path: str | Path) -> list[str]:
    """The words of a vocabulary file in their order.

    Raises UserError: the file is missing, not UTF-8 or empty; a malformed line (named), or a word that occurs twice.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_VOCABULARY_BYTES + 1)
        if len(content) > MAX_VOCABULARY_BYTES:
            raise UserError(f"The vocabulary {path} has more than {MAX_VOCABULARY_BYTES >> 20} MiB.", _BUILD)
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"The vocabulary {path} cannot be read: {why}.", _BUILD) from error
    words: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        word, _, count = line.rstrip("\r").partition("\t")
        if not word and not count:
            continue
        if not WORD.fullmatch(word) or len(word) > MAX_WORD or (count and not re.fullmatch("[0-9]{1,18}", count)):
            raise UserError(f"Line {number} of {path} is not a word with its count: {line[:80]!r}.", _BUILD)
        if word in words:
            raise UserError(f"'{word}' occurs twice in {path}: lines {words[word]} and {number}.", "Keep one of them.")
        words[word] = number
        if len(words) > MAX_WORDS:
            raise UserError(f"{path} has more than {MAX_WORDS:,} words.", "Build it with a larger --min-count.")
    if not words:
        raise UserError(f"The vocabulary {path} is empty.", _BUILD)
    return list(words)


def find_vocabulary(folders: Iterable[str | Path]) -> Path:
    """`vocabulary.txt` in the first folder, or parent of one, that has it. Raises UserError."""
    tried = []
    for data in folders:
        folder = Path(data) if Path(data).is_dir() else Path(data).parent
        exists = folder.is_dir() if re.search(r"[*?\[{]", Path(data).name) else Path(data).exists()
        if not exists and not is_remote(str(data)):
            raise UserError(
                f"The data path {data} does not exist.",
                "Name a folder with data, or make the synthetic data with `python -m tools.make_scenes data/scenes`.",
            )
        for path in (folder / VOCABULARY, folder.parent / VOCABULARY):
            if path.is_file():
                return path
            tried.append(str(path))
    raise UserError(
        f"The model reads words, but there is no vocabulary (tried {', '.join(dict.fromkeys(tried)) or 'nothing'}).",
        f"Set model.vocabulary to a file. {_BUILD}",
    )


def read_vectors(path: str | Path, words: Collection[str]) -> dict[str, np.ndarray]:
    """Vectors of those words that a file in GloVe's text format has, (dimension,) float32 each; plain or .gz.

    A line is a word and its numbers with one space between them. Of duplicate words the first counts; numbers of other
    words are not parsed. Raises UserError: the file cannot be read, or a line (named) has not as many numbers as the
    first, or not only finite numbers.
    """
    wanted, found, dimension = set(words), {}, None
    try:
        with gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if len(line) == MAX_LINE:
                    raise _malformed(path, number, f"{MAX_LINE >> 20} MiB or more")
                fields = line.rstrip().rsplit(b" ", dimension or -1)
                dimension = dimension or len(fields) - 1
                if dimension < 1 or len(fields) != dimension + 1:
                    raise _malformed(path, number, f"{len(fields) - 1} numbers in place of {dimension or 'some'}")
                word = fields[0].decode("utf-8", "replace")
                if word in wanted and word not in found:
                    found[word] = _numbers(fields[1:], path, number)
    except (OSError, EOFError, gzip.zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = f"The word vectors {path} cannot be read: {why}."
        raise UserError(what, "Check the path, or fetch it again.") from error
    if dimension is None:
        raise UserError(f"The word vectors {path} are empty.", "Give a file in GloVe's text format.")
    return found


def _numbers(fields: Sequence[bytes], path: str | Path, number: int) -> np.ndarray:
    try:
        vector = np.array([float(field) for field in fields], dtype=np.float32)
    except ValueError:
        raise _malformed(path, number, "something that is not a number") from None
    if not np.isfinite(vector).all():
        raise _malformed(path, number, "a number that is not finite")
    return vector


def _malformed(path: str | Path, number: int, what: str) -> UserError:
    return UserError(
        f"Line {number} of {path} has {what}.", "Give a file in GloVe's text format: a word and its numbers a line."
    )
