"""Images of requests: from URLs or base64 text to pixels."""
