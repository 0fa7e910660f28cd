"""Formats of models' tool calls. Each splits an answer's text into pieces."""
