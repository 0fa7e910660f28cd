"""An engine process in which vLLM computes the tokens. It has the same messages as our engine.

It runs in vLLM's own environment. Of our dependencies, this has only msgspec and numpy.
"""
