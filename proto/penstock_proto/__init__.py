"""The contract between routers and shards: the wire, how it is carried, and how prefixes hash.

Knows gRPC and protobuf. Knows nothing of models, HTTP or text.
"""

# Raise with every additive change of shard.proto; raise the minimum only with a new package.
SCHEMA_REVISION = 7
MIN_SCHEMA_REVISION = 1
