"""Draft tokens for speculative decoding."""
