"""What readers of formats are made of: marks, JSON, Python's literals, tagged arguments."""
