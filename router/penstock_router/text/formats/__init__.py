"""Formats of models' tool calls, one per file: an answer's text in, pieces out."""
