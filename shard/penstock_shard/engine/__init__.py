"""The engine process: scheduler and runner, step after step."""
