"""Models on transformers' code, with our paged cache and our products."""
