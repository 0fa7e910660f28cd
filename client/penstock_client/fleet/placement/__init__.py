"""Decides where streams run, and sends there what they need first."""
