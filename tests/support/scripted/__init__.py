"""A shard whose model says what a script holds."""
