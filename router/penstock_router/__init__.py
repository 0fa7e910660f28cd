"""The router: HTTP in, token ids to a fleet of shards, text out.

Start reading at `generation/generation.py`. Shards are reached only through `penstock_client`:
nothing here imports torch or the gRPC stubs.
"""
