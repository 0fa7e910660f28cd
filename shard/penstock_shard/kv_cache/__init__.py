"""Which KV blocks there are, and who holds them. Plain integers."""
