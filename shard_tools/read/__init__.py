"""Torch datasets over shards: random access into stock tar and LMDB files at the speed of the disk.

    from shard_tools.read import ShardDataset

    dataset = ShardDataset("/nvme/photos", decode="pillow")
    image, label_index = dataset[0]
    dataset.record(0).path          # where the sample came from
    dataset.classes[label_index]

The same name opens both formats. A dataset can be pickled, and used under fork, spawn and forkserver: files
are opened in each process when they are first needed. Stored data is never unpickled.
"""

from shard_tools.read.dataset import ShardDataset
from shard_tools.read.decode import DecodeError

__all__ = ["DecodeError", "ShardDataset"]
