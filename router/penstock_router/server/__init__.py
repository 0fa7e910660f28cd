"""HTTP below the handlers: connections, TLS, content codings, streams of events."""
