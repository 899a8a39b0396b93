"""Fetch one shard with img2dataset: its requests are bounded, its images are decoded by `decode_image` alone, and what
it has written is read back before it counts.

Imports img2dataset, which takes seconds.
"""

import io
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no request for its latest version
os.environ.setdefault("TQDM_DISABLE", "1")

from img2dataset.downloader import Downloader, is_disallowed
from img2dataset.resizer import Resizer
from img2dataset.writer import WebDatasetSampleWriter

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.files import flush
from tools.download.records import HASH, Paths
from tools.download.web import Limits, install
from tools.shards import check_shard

OPT_OUT = ["noai", "noimageai", "noindex", "noimageindex", "none"]


class UprightResizer(Resizer):
    """img2dataset's, of images that `decode_image` has decoded: only JPEG, PNG and WebP of bounded size, upright."""

    def __init__(self, options, resize: str):
        super().__init__(
            image_size=options.image_size,
            resize_mode=resize,
            resize_only_if_bigger=not options.upscale,
            encode_quality=options.quality,
            min_image_size=options.min_size,
        )

    def __call__(self, stream, boxes=None) -> tuple:
        plain = io.BytesIO()
        try:
            decode_image(stream.read(), exif=True).save(plain, "BMP")
        except BadSample as error:
            return None, None, None, None, None, f"broken image|{error}"
        return super().__call__(plain, boxes)


class Fetcher(Downloader):
    """img2dataset's downloader of a shard.

    Args:
        folder: of the corpus.
        options: of the command.
        columns: of the rows, beside url and caption.
    """

    def __init__(self, folder: Path, options, columns: Sequence[str]):
        self.paths = Paths(folder.absolute())
        patience = min(options.patience, options.seconds)
        size = int(options.max_mib * 2**20)
        forbid = partial(is_disallowed, user_agent_token=options.user_agent, disallowed_header_directives=OPT_OUT)
        limits = options.seconds, patience, size, options.private_hosts
        self.limits = Limits(*limits, opted_out=forbid if options.respect_opt_out else None)
        super().__init__(
            sample_writer_class=WebDatasetSampleWriter,
            resizer=UprightResizer(options, options.resize or "keep_ratio"),
            thread_count=options.threads,
            save_caption=True,
            extract_exif=False,
            output_folder=str(self.paths.work),
            column_list=[*columns, "caption", "url"],
            timeout=patience,
            number_sample_per_shard=max(options.shard_size, 2),
            oom_shard_count=5,
            compute_hash=HASH,
            verify_hash_type=None,
            encode_format="jpg",
            retries=0,  # --retry-failed does it later
            user_agent_token=options.user_agent,
            disallowed_header_directives=OPT_OUT if options.respect_opt_out else None,
        )

    def fetch(self, number: int, rows: str) -> str:
        """Fetch shard `number` with the rows of a file, which is removed; returns why it is not done, or nothing."""
        try:
            install(self.limits)
            copy = self.paths.work / f"{number:05d}.arrow"
            shutil.copyfile(rows, copy)  # img2dataset removes it
            self.download_shard((number, str(copy)))
            self.keep(number)
        except Exception as error:  # img2dataset's too
            return str(error) or type(error).__name__
        os.unlink(rows)
        return ""

    def keep(self, number: int) -> None:
        """Move the finished shard into its place, the tar first. Raises ValueError: it does not read back."""
        work = self.paths.work / f"{number:05d}"
        tar, stats = work.with_suffix(".tar"), Path(f"{work}_stats.json")
        got, report = json.loads(stats.read_text())["successes"], check_shard(tar)
        if report.damage or report.bad_samples or report.samples != got:
            reasons = report.damage or [bad["reason"] for bad in report.bad_samples] or ["samples are missing"]
            raise ValueError(f"shard {number} does not read back: {reasons[0]}")
        flush(tar)
        if got:
            tar.replace(self.paths.tar(number))
        else:
            tar.unlink()
        work.with_suffix(".parquet").replace(self.paths.rows(number))
        stats.replace(self.paths.stats(number))
