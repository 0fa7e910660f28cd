"""Metrics, logs and traces. The router makes no decisions by them."""
