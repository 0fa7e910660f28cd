"""Models that run on the code of transformers, with our paged cache and our products."""
