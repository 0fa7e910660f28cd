"""Attention over the paged KV cache; each backend has a module."""
