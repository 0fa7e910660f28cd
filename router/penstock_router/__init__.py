"""The router: everything that is text. HTTP in, token ids to a fleet of shards, text out.

Start reading at `generation/generation.py`. Imports neither torch nor the wire's stubs: shards are
reached only through `penstock_client`.
"""
