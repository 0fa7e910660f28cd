"""Parts of formats' readers: marks, JSON, Python literals, tagged arguments."""
