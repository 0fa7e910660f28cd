"""text-generation-inference's own API."""
