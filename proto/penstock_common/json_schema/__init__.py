"""JSON Schema as routers and shards read it."""
