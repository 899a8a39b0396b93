"""All samples of shards, in order."""

import os

from probemb.data.shards.index import Shard
from probemb.data.shards.samples import list_samples, parse_sample, read_sample


def iterate_samples(sources):
    """Samples of shards, or of the paths of tars, one after another; each needs a caption or a class index."""
    for source in [sources] if isinstance(sources, (str, os.PathLike, Shard)) else sources:
        with open(source.path if isinstance(source, Shard) else source, "rb") as file:
            for span in list_samples(file)[0]:
                yield parse_sample(read_sample(file.fileno(), span), span.key, need_caption=False)
