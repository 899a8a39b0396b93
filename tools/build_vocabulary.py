"""Build a vocabulary from captions, for models whose text tower reads words.

    python -m tools.build_vocabulary data/scenes/train --out data/scenes/vocabulary.txt
    python -m tools.build_vocabulary dataset_coco.json --split train --out coco.txt --min-count 4

DATA are images with captions in any form (docs/data.md): shards, a Karpathy json, a CSV, …
OUT has one word and its count per line, the most frequent first. A run uses the file that `model.vocabulary` names, or
else vocabulary.txt in the folder of its training data or the folder above.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Count
from probemb.data.captions.find import find_captions
from probemb.data.image_loader import find_tars, read_samples
from probemb.data.words import count_words, frequent_words, write_vocabulary
from probemb.errors import UserError
from probemb.files import writing
from probemb.progress import progress


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.build_vocabulary", description="Build a vocabulary from captions.")
    parser.add_argument("data", nargs="+", metavar="DATA", help="shards, a Karpathy json, or caption files")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--split", help="train, val, test, or another that the data names (default: all)")
    parser.add_argument("--min-count", type=Count, default=4, help="least occurrences of a word (default: 4)")
    parser.add_argument("--max-words", type=Count, help="keep so many of the most frequent words (default: all)")
    options = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    captions = sum(count_captions(data, options.split, counts) for data in options.data)
    words = frequent_words(counts, options.min_count, options.max_words)
    if not words:
        what = f"None of the {len(counts):,} words occurs {options.min_count} times."
        raise UserError(what, "Give a smaller --min-count.")
    with writing(options.out):
        write_vocabulary(options.out, words)
    covered = sum(count for _, count in words) / counts.total()
    print(
        f"wrote {options.out}: {len(words):,} of {len(counts):,} words of {captions:,} captions, "
        f"{100 * covered:.2f} % of all occurrences"
    )
    return 0


def count_captions(data: str, split: str | None, counts: Counter[str]) -> int:
    """Add the words of all captions of a path to `counts`; returns the number of captions. Raises UserError."""
    shards = find_tars(data) if split is None else []
    if not shards or any(shard.suffix != ".tar" for shard in shards):  # caption files
        captions = find_captions(data, split=split).flat()
        counts.update(count_words(captions))
        return len(captions)
    total = 0
    with progress("Shards", len(shards)) as advance:
        for shard in shards:  # one at a time: a large corpus does not fit into memory
            for captions in read_samples([shard], ("txt", "json"), lambda sample: sample.captions, None)[1]:
                counts.update(count_words(captions))
                total += len(captions)
            advance(1)
    if not total:
        raise UserError(f"{data} holds no captions.", "Name shards with KEY.txt or KEY.json beside each image.")
    return total


if __name__ == "__main__":
    run_command(main)
