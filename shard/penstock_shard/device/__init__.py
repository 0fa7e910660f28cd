"""What the machine has: memory, limits of containers, compilers for its device."""
