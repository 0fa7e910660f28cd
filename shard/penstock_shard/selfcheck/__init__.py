"""Tests at load that this machine computes right results."""
