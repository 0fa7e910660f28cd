"""The tokens of an image, for each family of models."""
