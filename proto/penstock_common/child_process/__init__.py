"""Child processes: how they start and end, and the messages on their sockets."""
