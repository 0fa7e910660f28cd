"""Our own decoder: driven by a spec, written on the ops interface."""
