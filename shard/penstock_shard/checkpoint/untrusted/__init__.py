"""What an author of files may have made to do harm: read within bounds of time and memory."""
