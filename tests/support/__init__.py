"""Shared by the tests: budgets, seeds, small models, real processes."""
