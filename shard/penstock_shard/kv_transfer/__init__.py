"""Copies of KV blocks in host memory, on disk and at peers."""
