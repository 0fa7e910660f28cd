"""Fixtures of the client's tests."""

from support.fleet_doubles import make

__all__ = ["make"]
