"""KV blocks that go to other shards and come from them, as far as the server has a part in it."""
