"""Chooses the shard for a request. Policies see only a snapshot of the shards, and use no I/O or
clock.
"""
