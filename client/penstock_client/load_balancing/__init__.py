"""Which shard takes the next request. No I/O and no clock: a policy sees a snapshot and decides."""
