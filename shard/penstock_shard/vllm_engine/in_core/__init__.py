"""Changes to vLLM's scheduler, constraints and worker; its processes import them."""
