"""Words (lower-case ASCII letters and digits, and an ending such as "'s"), vocabulary files, and word vectors.

A vocabulary file is UTF-8 with a word a line, the most frequent first, each perhaps followed by a tab and its count.
"""

import gzip
import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from probemb.data.reading import check_unique, checked, parse_all, parse_lines
from probemb.errors import UserError
from probemb.files import replace_file

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
MAX_CHARACTERS = 4096  # of a text that is read
MAX_WORD = 128  # characters of a word; longer ones are cut, and are then unknown
MAX_LINE = 1 << 20  # bytes of a file of vectors
VOCABULARY = "vocabulary.txt"
_BUILD = "Build one with `python -m tools.build_vocabulary DATA --out vocabulary.txt`."


def split_words(text: str, most: int | None = None) -> list[str]:
    """The words of a text in lower case, at most `most` of them."""
    return [match.group()[:MAX_WORD] for match in islice(WORD.finditer(text[:MAX_CHARACTERS].lower()), most)]


def frequent_words(counts: Counter[str], min_count: int = 1, max_words: int | None = None) -> list[tuple[str, int]]:
    """(word, count) with at least `min_count` occurrences, the most frequent first, ties in alphabetical order."""
    kept = sorted((item for item in counts.items() if item[1] >= min_count), key=lambda item: (-item[1], item[0]))
    return kept[:max_words]


def count_words(texts: Iterable[str]) -> Counter[str]:
    return Counter(word for text in texts for word in split_words(text))


def write_vocabulary(path: str | Path, words: Iterable[tuple[str, int]]) -> None:
    text = "".join(f"{word}\t{count}\n" for word, count in words)
    replace_file(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


def read_vocabulary(path: str | Path) -> list[str]:
    """The words of a vocabulary file in their order. Raises UserError."""

    def parse(line: str) -> str:
        word, _, count = line.partition("\t")
        if not WORD.fullmatch(word) or len(word) > MAX_WORD or not re.fullmatch("[0-9]{0,18}", count):
            raise ValueError(f"{line[:80]!r} is not a word with its count")
        return word

    words = parse_lines(Path(path), "a vocabulary", parse) if Path(path).is_file() else []
    check_unique(words, "word", path)
    if not words:
        raise UserError(f"model.vocabulary: {path} does not exist, or holds no word.", _BUILD)
    return words


def find_vocabulary(folders: Iterable[str | Path]) -> Path:
    """`vocabulary.txt` in the first folder, or parent of one, that has it."""
    near = [folder if folder.is_dir() else folder.parent for folder in map(Path, folders)]
    tried = dict.fromkeys(place / VOCABULARY for folder in near for place in (folder, folder.parent))
    if found := next(filter(Path.is_file, tried), None):
        return found
    what = f"The model reads words, but there is no vocabulary (tried {', '.join(map(str, tried)) or 'nothing'})."
    raise UserError(what, f"Set model.vocabulary to a file. {_BUILD}")


def read_vectors(path: str | Path, words: Collection[str]) -> dict[str, np.ndarray]:
    """Vectors of those words that a file in GloVe's text format has, (dimension,) float32 each; plain or .gz.

    A line is a word and its numbers with one space between them. Of duplicate words the first counts; numbers of other
    words are not parsed. Raises UserError.
    """
    wanted, found, widths = set(words), {}, set()

    def parse(line: bytes) -> None:
        fields = line.rstrip().rsplit(b" ", min(widths, default=-1))
        widths.add(len(fields) - 1)
        if len(widths) > 1 or widths == {0} or len(line) == MAX_LINE:
            raise ValueError(f"there are {len(fields) - 1} numbers in place of {max(widths) or 'some'}")
        word = fields[0].decode("utf-8", "replace")
        if word in wanted and word not in found:
            found[word] = np.array([float(field) for field in fields[1:]], dtype=np.float32)
            if not np.isfinite(found[word]).all():
                raise ValueError("a number is not finite")

    what = "a file in GloVe's text format"
    with checked(path, what), gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
        parse_all(path, what, iter(lambda: file.readline(MAX_LINE), b""), parse, "line")
        if not widths:
            raise ValueError("it is empty")
    return found
