"""Write new shards of what can be read in damaged ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.shards.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    SampleSpan,
    group_members,
    parse_sample,
    read_sample,
    sort_groups,
)
from probemb.data.shards.tar import salvage_tar
from probemb.data.shards.writer import tar_writer
from probemb.errors import UserError
from probemb.files import replace_file


def repair_folder(folder: Path, names: Sequence[str], out: Path, need_caption: bool = True) -> dict[str, int]:
    """Write `out/NAME` for each damaged shard; returns the number of its samples by name.

    A shard without a readable sample gets no file. Raises UserError: `out` is the folder itself, holds such a file
    already, or cannot be written.
    """
    if out.resolve() == folder.resolve():
        raise UserError(f"{out} holds the damaged shards themselves.", "Give --repair another folder.")
    present = [name for name in names if (out / name).exists()]
    if present:
        raise UserError(f"{out / present[0]} is there already.", "Give --repair a new folder.")
    saved = {}
    for name in names:
        try:
            saved[name] = repair_shard(folder / name, out / name, need_caption)
        except OSError as error:
            raise UserError(
                f"{out / name} cannot be written: {error.strerror}.", "Free some space, or name another folder."
            ) from None
    return saved


def repair_shard(path: Path, repaired: Path, need_caption: bool = True) -> int:
    """Write the readable samples of a shard as a new one; returns their number."""
    with open(path, "rb") as file:
        good = list(_readable(file.fileno(), _samples(file), need_caption))

        def write(aside: Path) -> None:
            with open(aside, "wb") as target, tar_writer(target) as tar:
                for span in good:
                    tar.write({"__key__": span.key, **read_sample(file.fileno(), span)})

        if good:
            replace_file(repaired, write)
    return len(good)


def _samples(file) -> list[SampleSpan]:
    """The samples of a damaged tar; parts of one key that are apart from each other are put together."""
    samples, others = sort_groups(group_members(salvage_tar(file)))
    together: dict[str, dict] = {}
    for key, parts in others:
        together.setdefault(key, {}).update(parts)
    return samples + sort_groups(SampleSpan(key, parts) for key, parts in together.items())[0]


def _readable(fd: int, spans: Sequence[SampleSpan], need_caption: bool) -> Iterator[SampleSpan]:
    for span in spans:
        if reason_unusable(fd, span, need_caption) is None:
            yield span


def reason_unusable(fd: int, span: SampleSpan, need_caption: bool) -> str | None:
    """Reason that training cannot use a sample; None if it can."""
    try:
        decode_image(parse_sample(read_sample(fd, span), span.key, need_caption).image)
    except BadSample as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({os.strerror(error.errno)})"
    return None


def split_kind(span: SampleSpan) -> str:
    """The half of a sample that an incomplete group of files is: "image", "text" or ""."""
    has_image = any(ext in span.parts for ext in IMAGE_EXTENSIONS)
    has_text = any(ext in span.parts for ext in TEXT_EXTENSIONS)
    return "image" if has_image and not has_text else "text" if has_text and not has_image else ""


if __name__ == "__main__":
    raise SystemExit("This is not a command. Use `python -m tools.index_shards --repair`; see its --help.")
