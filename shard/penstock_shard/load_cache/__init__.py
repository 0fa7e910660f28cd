"""Results of model loads, kept on disk for the next start."""
