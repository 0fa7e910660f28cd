"""The router: everything that is text. HTTP in, token ids to a fleet of shards, text out.

Start reading at `generation/generation.py`. Nothing here imports torch or the wire's stubs: shards
are reached through `penstock_client` alone.
"""
