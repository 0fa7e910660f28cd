"""Tools that a body offers, the functions that represent them to the model, and their choice."""
