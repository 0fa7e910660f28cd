"""An engine process in which vLLM computes the tokens. Its messages are those of our engine.

It runs in vLLM's own environment, which has only msgspec and numpy of our dependencies.
"""
