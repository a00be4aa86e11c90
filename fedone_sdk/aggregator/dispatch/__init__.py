"""Dispatch of work: the pool of waiting clients, their polls, and their open assignments."""
