"""How many tokens an image takes, and which: each family of models writes it in its own way."""
