"""What an output must look like: languages, their compiler, and the process that tries them out."""
