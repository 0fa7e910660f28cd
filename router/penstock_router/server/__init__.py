"""HTTP below the handlers: connections, TLS, content codings, event streams."""
