"""Text to token ids and back, and the meaning of models' text. No HTTP, no shards."""
