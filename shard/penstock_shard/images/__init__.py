"""What a model sees: from pixels to rows in the place of a prompt's image tokens."""
