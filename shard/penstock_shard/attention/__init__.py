"""Attention over the paged KV cache, with one module for each backend."""
