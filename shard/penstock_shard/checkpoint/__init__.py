"""Files of a model: where they are, what they hold, their hashes."""
