"""The choice of tokens for the next step. Plain numbers, no torch."""
