"""Dates of certificates."""
