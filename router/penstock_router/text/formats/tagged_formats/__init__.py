"""Formats whose calls have each argument between tags of its own."""
