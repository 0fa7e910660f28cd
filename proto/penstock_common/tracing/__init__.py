"""Spans of requests, and how they are exported."""
