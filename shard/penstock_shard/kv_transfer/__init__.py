"""Copies of KV blocks outside the device, from where they come back when they are needed."""
