"""Logits -> tokens and log-probabilities."""
