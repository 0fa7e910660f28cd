"""Several shards as one: which there are, their state, and requests that outlive any of them."""
