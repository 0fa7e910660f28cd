"""Choice of the next request's shard. No I/O and no clock: a policy sees a snapshot and decides."""
