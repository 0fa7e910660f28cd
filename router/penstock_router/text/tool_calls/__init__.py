"""Formats of tool calls, one file for each model family: an answer's text in, pieces out."""
