"""Metrics, log lines and traces of a shard and its requests."""
