"""JSON Schema as routers and shards both read it."""
