"""Formats whose tool calls look like calls in Python."""
