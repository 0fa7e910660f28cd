"""Converts text to token ids and back, and interprets models' answers. No HTTP, no shards."""
