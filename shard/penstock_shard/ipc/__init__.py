"""Messages between the server process and the engine process."""
