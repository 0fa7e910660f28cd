"""Choices for a model: ops, attention backend, dtype of cached keys and values."""
