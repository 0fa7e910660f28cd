"""What the console shows."""
