"""How models write calls of functions: one file a family, text in and pieces out."""
