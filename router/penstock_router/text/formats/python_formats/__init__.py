"""Formats with Python calls."""
