"""A model over several devices, with a process for each. All processes compute every step."""
