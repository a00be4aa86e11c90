"""Helpers around asyncio: shielded work, threads, rate limits."""
