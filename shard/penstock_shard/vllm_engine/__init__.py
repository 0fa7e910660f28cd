"""An engine process whose tokens vLLM computes: the same messages, another engine behind them.

It runs in vLLM's own environment, which has msgspec and numpy and nothing else of ours.
"""
