"""Weights as small integers with scales, and the file layouts of such weights."""
