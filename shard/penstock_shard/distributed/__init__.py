"""A model over several devices. Each has a process, and all processes compute every step."""
