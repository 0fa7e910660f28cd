"""A request from its prompts to the end of its answer, whichever API it came by."""
