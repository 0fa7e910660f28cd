"""Weights as small integers with scales, and file layouts that are read as such integers."""
