"""Checks of a loaded vLLM by trial requests, before it serves requests."""
