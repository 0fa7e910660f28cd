"""Failures on a clock of their own: real clients, servers and engines in one process, by a seed.

`python -m simulation` runs histories; `history.py` is the file to read first. What policies and the
scheduler decide is simulated alone, for many more requests: `policies.py`, `scheduling.py`.
"""
