"""Formats with JSON arguments."""
