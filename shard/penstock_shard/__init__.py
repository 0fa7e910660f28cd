"""A shard: one model behind gRPC, token ids in and token ids out. It never sees text."""
