"""What is served at which path: the only place, besides `sse`, where aiohttp's requests are."""
