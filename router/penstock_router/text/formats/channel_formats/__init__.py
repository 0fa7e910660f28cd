"""Formats that divide the whole answer into channels: reasoning, text, calls."""
