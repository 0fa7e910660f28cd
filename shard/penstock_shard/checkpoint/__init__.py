"""Files of a model: finding, reading and hashing them."""
