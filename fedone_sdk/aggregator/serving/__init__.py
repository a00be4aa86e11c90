"""Serving of runs: clients and their work, the gateway, evaluation."""

__all__: list[str] = []
