"""Models that run on the code of transformers, over our paged cache and on our products."""
