"""`penstock bench`: puts load on a server, and measures what users would see."""
