"""Items of an answer while it is made."""
