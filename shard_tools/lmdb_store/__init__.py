"""LMDB shards: one file each, in the 0.9 format that every LMDB binding reads."""

from shard_tools.lmdb_store.reader import open_environment, read_shard, wrong_payloads
from shard_tools.lmdb_store.value import payload_span, split_value
from shard_tools.lmdb_store.writer import write_shard

__all__ = ["open_environment", "payload_span", "read_shard", "split_value", "write_shard", "wrong_payloads"]
