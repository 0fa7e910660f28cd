"""The machine: memory, containers' limits, cache directories and Triton."""
