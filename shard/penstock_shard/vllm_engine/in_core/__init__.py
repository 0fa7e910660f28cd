"""Changes to vLLM's scheduler and constraints; its core imports them."""
