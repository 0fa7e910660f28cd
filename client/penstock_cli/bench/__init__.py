"""`penstock bench`: load on a server, measured as a user sees it."""
