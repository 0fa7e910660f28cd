"""HTTP handlers and their paths: the only place, besides `sse`, for aiohttp's requests."""
