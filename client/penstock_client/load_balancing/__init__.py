"""Chooses the shard for a request. Policies use a snapshot of the shards, no I/O and no clock."""
