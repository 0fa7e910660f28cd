"""Code that routers, shards and tools share: flags, logs, TLS, tracing, the file of keys."""
