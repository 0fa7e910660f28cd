"""KV blocks and the sequences that have them, as plain integers."""
