"""Limits on requests, queues, and shares of clients."""
