"""Changes to vLLM's scheduler and constraints, imported by the process of its core."""
