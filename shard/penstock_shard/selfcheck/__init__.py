"""Tests at load that what this machine computes is right."""
