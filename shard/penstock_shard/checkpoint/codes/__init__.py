"""Weights as small integers with scales, and the layouts of files that are read as them."""
