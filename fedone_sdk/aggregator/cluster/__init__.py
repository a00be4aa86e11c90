"""Replicas on one store: signals, leader election, deadlines."""

__all__: list[str] = []
