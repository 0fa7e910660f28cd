"""Items of an answer that is being generated."""
