"""Serving of runs: clients and their work, the gateway, evaluation, archives."""

__all__: list[str] = []
