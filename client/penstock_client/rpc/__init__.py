"""A shard over gRPC: calls, streams, and the translation to protobuf messages."""
