"""The contract between routers and shards: the wire, and what both ends share besides.

That is how messages are carried, prefix hashes, TLS, flags, logs, tracing with its export over
OTLP, and names of metrics. Knows gRPC and protobuf; no models, no text and no HTTP API.
"""

# Raise with every additive change of shard.proto; raise the minimum only with a new package.
SCHEMA_REVISION = 8
MIN_SCHEMA_REVISION = 1
