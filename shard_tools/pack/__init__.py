"""Pack a folder into shards: parallel, resumable, and visible under its name only once it is whole."""

from shard_tools.pack.job import PackResult, default_workers, pack_folder

__all__ = ["PackResult", "default_workers", "pack_folder"]
