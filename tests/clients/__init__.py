"""Tests with released clients. A package, so that the servers that they share end with them."""
