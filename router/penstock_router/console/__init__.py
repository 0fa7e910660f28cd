"""Data for the console."""
