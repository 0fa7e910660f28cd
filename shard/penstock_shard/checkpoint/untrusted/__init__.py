"""Readers of files whose authors may be malicious. Time and memory are bounded."""
