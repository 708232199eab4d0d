"""shard_tools: pack small-file datasets into verified WebDataset tar or LMDB shards."""
