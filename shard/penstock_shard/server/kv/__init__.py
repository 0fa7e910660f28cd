"""KV blocks exchanged with other shards: the server's part of it."""
