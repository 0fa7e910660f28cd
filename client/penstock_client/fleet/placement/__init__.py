"""Where streams run, and what goes there before them."""
