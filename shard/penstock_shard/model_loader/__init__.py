"""Turns --model into a runner that is ready."""
