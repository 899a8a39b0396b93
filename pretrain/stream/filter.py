"""The rules by which samples of a corpus are used or left out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jsonargparse.typing import NonNegativeInt, restricted_number_type

Aspect = restricted_number_type("Aspect", float, (">=", 1))
BOUNDS = ("min_score", "max_score")  # that may differ between corpora


@dataclass(frozen=True)
class Filter:
    """Rules that a sample must meet to be in the order; `tools.shards measure` measures what they need.

    Args:
        min_side: least pixels of an image's shorter side.
        max_side: most pixels of its longer side.
        max_aspect: longest side / shortest side at most.
        min_words: least words of each of a sample's captions.
        max_words: most words.
        min_chars: least characters of each caption.
        max_chars: most characters.
        score: name of a score, as given to `--score`.
        min_score: its least value; samples without a score are left out. Or a list, one for each of `train`: null is no
            bound, for which no score is needed.
        max_score: its largest value, or a list.
        keep: file with the keys of the samples to use, one a line: KEY, SHARD.tar/KEY for a shard's, or
            FOLDER/SHARD.tar/KEY where several corpora have such a shard.
        drop: file with the keys of samples to leave out, such as duplicates.
        columns: folders with columns, one for each of `train`; empty for `columns` beside the shards.
    """

    min_side: NonNegativeInt | None = None
    max_side: NonNegativeInt | None = None
    max_aspect: Aspect | None = None
    min_words: NonNegativeInt | None = None
    max_words: NonNegativeInt | None = None
    min_chars: NonNegativeInt | None = None
    max_chars: NonNegativeInt | None = None
    score: str | None = None
    min_score: float | list[float | None] | None = None
    max_score: float | list[float | None] | None = None
    keep: str | None = None
    drop: str | None = None
    columns: list[str] | None = None

    @property
    def rules(self) -> dict[str, int | float | str]:
        """The rules that are set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "columns"}
        return {name: value for name, value in values.items() if value is not None}

    def of_corpus(self, number: int) -> Filter:
        """The filter with the bounds of one corpus."""
        bounds = {name: getattr(self, name) for name in BOUNDS}
        own = {name: bound[number] if isinstance(bound, list) else bound for name, bound in bounds.items()}
        return replace(self, **own)


NO_FILTER = Filter()
