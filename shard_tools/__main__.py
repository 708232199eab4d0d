"""``python -m shard_tools``."""

from shard_tools.cli import main

main()
