"""Tests of whole processes. A package, so that what its files share ends with them: servers that have
nothing to do take a second of each minute all the same.
"""
