"""Formats of models' tool calls. Each reads an answer's text into pieces."""
