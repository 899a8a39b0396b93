"""The last step of a download: images that came from several addresses are kept once."""

from __future__ import annotations

from pathlib import Path

from tools.download.shard import GOT, ShardPaths, remove_samples


def drop_duplicates(folder: Path, shards: int) -> int:
    """Take every image out whose hash an earlier shard has; shards with such images are written anew, one at a time.

    Returns how many images were taken out. Raises OSError.
    """
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    hashes, owners = [], []
    for number in range(shards):
        table = pq.read_table(ShardPaths(folder, number).records, columns=["cause", "hash"])
        found = table.filter(pc.equal(table["cause"], GOT))["hash"].to_pylist()
        hashes.append(np.array([int(one[:16], 16) for one in found], np.uint64))
        owners.append(np.full(len(found), number, np.int32))
    if not hashes:
        return 0
    hash_N, owner_N = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(hash_N, kind="stable")  # equal ones stay in the order of their shards
    again = np.zeros(len(order), bool)
    again[order[1:]] = hash_N[order[1:]] == hash_N[order[:-1]]
    for number in np.unique(owner_N[again]).tolist():
        paths = ShardPaths(folder, number)
        table = pq.read_table(paths.records, columns=["key", "cause"])
        keys = table.filter(pc.equal(table["cause"], GOT))["key"].to_pylist()
        drop = [key for key, twice in zip(keys, again[owner_N == number]) if twice]
        remove_samples(folder, number, drop)
    return int(again.sum())
