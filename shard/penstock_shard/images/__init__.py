"""Images for models: computes features from pixels and puts them at a prompt's image tokens."""
