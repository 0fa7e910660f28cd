"""Tests of two checkouts. A package, so that the servers that they share end with them."""
