"""Which tokens the next step computes. Plain numbers, no torch."""
