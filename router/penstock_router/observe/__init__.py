"""Metrics, logs, traces and profiles. Nothing here decides anything."""
