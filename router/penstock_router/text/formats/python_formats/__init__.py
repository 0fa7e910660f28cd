"""Formats whose calls are written as in Python."""
