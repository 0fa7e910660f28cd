"""Code that routers, shards and tools share."""
