"""A model over several machines: their connections, and the process on all except machine 0."""
