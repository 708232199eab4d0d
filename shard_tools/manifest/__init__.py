"""The manifest of a finished pack and the offset index beside each shard; both versioned."""

from shard_tools.manifest.document import MANIFEST_NAME, read_manifest, render, write_manifest
from shard_tools.manifest.durable import TEMPORARY, settle, sync_path, target_error, write_all, write_file
from shard_tools.manifest.index import INDEX_VERSION, IndexRow, ShardIndex, index_bytes

__all__ = [
    "INDEX_VERSION",
    "MANIFEST_NAME",
    "TEMPORARY",
    "IndexRow",
    "ShardIndex",
    "index_bytes",
    "read_manifest",
    "render",
    "settle",
    "sync_path",
    "target_error",
    "write_all",
    "write_file",
    "write_manifest",
]
