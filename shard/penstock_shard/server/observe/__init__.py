"""What a shard tells of itself and of its requests: metrics, log lines, traces."""
