"""The contract between routers and shards: messages, how they are carried, and prefix hashes."""

# Raise with every additive change of shard.proto; raise the minimum only with a new package.
SCHEMA_REVISION = 15
MIN_SCHEMA_REVISION = 1
