"""Who may ask for how much, who waits, and for how long."""
