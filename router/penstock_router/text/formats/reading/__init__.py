"""The parts of readers of formats: marks, JSON, Python's literals, tagged arguments."""
