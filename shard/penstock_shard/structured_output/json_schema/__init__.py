"""Rewrites JSON Schema in the keywords that llguidance handles correctly."""
