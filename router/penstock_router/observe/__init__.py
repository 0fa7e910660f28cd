"""Metrics, logs and traces. They decide nothing."""
