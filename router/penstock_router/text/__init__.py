"""Between text and token ids, and what models mean by their text. No HTTP, no shards."""
