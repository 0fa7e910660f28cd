"""The server process: gRPC in front of an engine process. Does not import torch."""
