"""The server's part of exchanging KV blocks with other shards."""
