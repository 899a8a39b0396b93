"""Rules for the samples of a corpus, and the samples that they keep, over which alone the order is drawn."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from probemb.data.shards.index import SCORE, Shard, key_hash, read_columns
from probemb.errors import UserError


@dataclass(frozen=True)
class Filter:
    """Rules that a sample must meet to be in the order; `tools.shards measure` measures what they need.

    Args:
        min_side: least pixels of an image's shorter side.
        max_side: most pixels of its longer side.
        max_aspect: largest ratio of its sides.
        min_words: least words of each of a sample's captions.
        max_words: most words.
        min_chars: least characters of each caption.
        max_chars: most characters.
        score: name of a score, as given to `--score`.
        min_score: its least value; samples without a score are left out.
        max_score: its largest value.
        keep: file with the keys of samples to use; one a line: KEY, SHARD.tar/KEY for a shard's, or
            FOLDER/SHARD.tar/KEY where several corpora have such a shard.
        drop: file with the keys of samples to leave out; such as duplicates.
        columns: columns.npz of each of `train`; empty for those beside the shards.
    """

    min_side: NonNegativeInt | None = None
    max_side: NonNegativeInt | None = None
    max_aspect: PositiveFloat | None = None
    min_words: NonNegativeInt | None = None
    max_words: NonNegativeInt | None = None
    min_chars: NonNegativeInt | None = None
    max_chars: NonNegativeInt | None = None
    score: str | None = None
    min_score: float | None = None
    max_score: float | None = None
    keep: str | None = None
    drop: str | None = None
    columns: list[str] | None = None

    @property
    def rules(self) -> dict[str, int | float | str]:
        """The rules that are set, by name."""
        return {name: value for name, value in asdict(self).items() if name != "columns" and value is not None}


_SIZE = ("width", "height")
# Rule -> its columns, and from its bound and them which samples it keeps. An unreadable image has a side of 0.
RULES: dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "min_side": (_SIZE, lambda bound, w, h: np.minimum(w, h) >= bound),
    "max_side": (_SIZE, lambda bound, w, h: (np.maximum(w, h) <= bound) & (w > 0)),
    "max_aspect": (_SIZE, lambda bound, w, h: (np.maximum(w, h) <= bound * np.minimum(w, h)) & (w > 0)),
    "min_words": (("fewest_words",), lambda bound, n: n >= bound),
    "max_words": (("most_words",), lambda bound, n: n <= bound),
    "min_chars": (("fewest_chars",), lambda bound, n: n >= bound),
    "max_chars": (("most_chars",), lambda bound, n: n <= bound),
    "min_score": (("score",), lambda bound, s: s >= np.float32(bound)),  # NaN is not
    "max_score": (("score",), lambda bound, s: s <= np.float32(bound)),
}


class Selection:
    """The kept samples of several corpora, each given by its shards; at least one rule of the filter is set.

    Attributes:
        sizes: kept samples in each shard of all corpora, (n,) int64.
        kept: their sum.

    Raises UserError: rules that do not go together; a column, score or file of keys is missing; nothing is kept; a list
    has a key that is in several corpora.
    """

    def __init__(self, corpora: Sequence[Sequence[Shard]], filter: Filter):
        self.rules = rules = filter.rules
        if ("score" in rules) != bool({"min_score", "max_score"} & rules.keys()):
            remedy = "Set data.filter.score to the name given to `tools.shards measure --score`, and a bound."
            raise UserError("data.filter.score needs min_score or max_score, and these need it.", remedy)
        if filter.columns and len(filter.columns) != len(corpora):
            what = f"data.filter.columns has {len(filter.columns)} values for {len(corpora)} training paths."
            raise UserError(what, "Give it one value for each path.")
        score = f"{SCORE}{filter.score}"
        read = {name: [score if c == "score" else c for c in RULES[name][0]] for name in RULES if name in rules}
        self._lists = {name: KeyList(rules[name]) for name in ("keep", "drop") if name in rules}
        names, self._left_out, masks = {*chain(*read.values()), *["key"] * bool(self._lists)}, Counter(), []
        for number, shards in enumerate(corpora):
            columns = read_columns(shards, sorted(names), filter.columns and filter.columns[number])
            verdicts = {name: RULES[name][1](rules[name], *(columns[c] for c in of)) for name, of in read.items()}
            for name, keys in self._lists.items():
                listed = keys.find(shards, columns["key"])
                verdicts[name] = listed if name == "keep" else ~listed
            self._left_out.update({name: int(np.count_nonzero(~mask)) for name, mask in verdicts.items()})
            masks.append(np.logical_and.reduce(list(verdicts.values())))
        self._kept = np.concatenate(masks)
        self._stops = np.cumsum([0, *(shard.samples for shards in corpora for shard in shards)], dtype=np.int64)
        counted = np.concatenate([[0], np.cumsum(self._kept)])[self._stops]
        self.sizes, self.kept = np.diff(counted), int(counted[-1])
        for keys in self._lists.values():
            if several := keys.count() - keys.count(0) - keys.count(1):
                listed = f"{several:,} of the {keys.count():,} keys of {keys.path}"
                remedy = "Write FOLDER/SHARD.tar/KEY, with as much of the path as tells the corpora apart."
                raise UserError(f"{listed} are in more than one corpus of data.train.", remedy)
        if not self.kept:
            raise UserError(f"The filter leaves no sample: {self.describe()}.", "Loosen the rules of data.filter.")

    @property
    def identity(self) -> str:
        """The rules and which samples they keep, for comparison when a run is resumed."""
        digest = hashlib.sha256(np.packbits(self._kept)).hexdigest()[:16]
        rules = self.rules | {name: Path(self.rules[name]).name for name in self._lists}
        return f"{', '.join(f'{name} {value}' for name, value in rules.items())} ({self.kept:,} kept, {digest})"

    def describe(self) -> str:
        """The kept share, and what each rule alone leaves out, in one line."""
        total, rules = len(self._kept), {name: f"{count:,}" for name, count in self._left_out.items()}
        for name, keys in self._lists.items():
            rules[name] += f" ({keys.count(0):,} of its {keys.count():,} keys are not in the data)"
        listed = ", ".join(f"{name} {rules[name]}" for name in self.rules if name in rules)
        return f"{self.kept:,} of {total:,} samples kept ({self.kept / total:.1%}); left out by {listed}"

    def places(self, shard: int) -> np.ndarray:
        """Indices of the kept samples in a shard, ascending, (sizes[shard],) int32."""
        return np.flatnonzero(self._kept[self._stops[shard] : self._stops[shard + 1]]).astype(np.int32)


class KeyList:
    """The samples that a file lists. Its lines are KEY of any shard, SHARD.tar/KEY of the shards of that name, and
    FOLDER/SHARD.tar/KEY of those whose path or address ends so; of a line the xor of the hashes of both parts is kept.
    Raises UserError: it cannot be read.
    """

    def __init__(self, path: str):
        self.path, self._fronts, lines = path, {"": np.uint64(0)}, array("Q")  # a line's front: all before the key
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                for line in file:
                    where, tar, key = line.rstrip("\r\n").rpartition(".tar/")
                    front = where + tar[:4]
                    if key:
                        self._fronts.setdefault(front, key_hash([front])[0])
                        lines.append(int(self._fronts[front] ^ key_hash([key])[0]))
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror}."
            raise UserError(what, "Name a file with one key a line.") from None
        self._lines = np.unique(np.array(lines, np.uint64))
        self._corpora = np.zeros(len(self._lines), np.int64)  # that have a line's sample

    def find(self, shards: Sequence[Shard], keys: np.ndarray) -> np.ndarray:
        """Mask of the listed samples of one more corpus, (n,) bool; `keys`: hashes of all its keys."""
        found, hits, stop = np.zeros(len(keys), bool), np.zeros(len(self._lines), bool), 0
        for shard in shards if len(self._lines) else ():
            start, stop = stop, stop + shard.samples
            names = str(shard.path).split("/")
            for front in {"", shard.name, *("/".join(names[i:]) for i in range(len(names)))} & self._fronts.keys():
                own = keys[start:stop] ^ self._fronts[front]
                at = np.searchsorted(self._lines, own).clip(max=len(self._lines) - 1)
                listed = self._lines[at] == own
                found[start:stop] |= listed
                hits[at[listed]] = True
        self._corpora += hits
        return found

    def count(self, corpora: int | None = None) -> int:
        """Different lines, or those that match in so many corpora."""
        return len(self._lines) if corpora is None else int((self._corpora == corpora).sum())
