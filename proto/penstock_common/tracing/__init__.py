"""Spans of requests, and their export."""
