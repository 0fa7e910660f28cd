"""The server process: gRPC in front of an engine process. Imports neither torch nor the engine."""
