"""Helpers for asyncio: shielded tasks, threads, rate limits."""

__all__: list[str] = []
