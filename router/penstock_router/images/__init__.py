"""Images of requests: from what a client names to pixels."""
