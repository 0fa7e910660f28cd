"""Chooses the tokens of the next step. Plain numbers, no torch."""
