"""Training of the built-in toy model: corpus, training and evaluation. Nothing here is shipped."""
