"""Attention over the paged KV cache, backend by backend."""
