"""Archives: a complete run in one file."""

__all__: list[str] = []
