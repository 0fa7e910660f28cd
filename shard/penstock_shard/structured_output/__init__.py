"""Constraints on outputs: their languages, their compiler, and the process that checks them."""
