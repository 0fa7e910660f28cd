"""How models write calls, a file a format: an answer's text in, pieces out."""
