"""`penstock serve`: a router and its shards as child processes on this machine."""
