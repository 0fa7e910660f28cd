"""Metrics, logs and traces of a shard and its requests."""
