"""What loads made of the files of models, kept on disk for the next start."""
