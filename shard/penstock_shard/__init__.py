"""A shard: one model behind gRPC, token ids in and token ids out. Never sees text."""
