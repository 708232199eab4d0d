"""WebDataset shards: plain USTAR archives that every tar tool reads."""

from shard_tools.tar_store.reader import read_shard
from shard_tools.tar_store.writer import write_shard

__all__ = ["read_shard", "write_shard"]
