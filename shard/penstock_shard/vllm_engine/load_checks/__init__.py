"""Checks at load of vLLM, by trial requests."""
