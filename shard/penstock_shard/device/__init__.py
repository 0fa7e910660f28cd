"""The machine: memory, limits of containers, and compilers for the device."""
