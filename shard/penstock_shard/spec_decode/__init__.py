"""Proposes draft tokens."""
