"""Formats whose calls have JSON as arguments."""
