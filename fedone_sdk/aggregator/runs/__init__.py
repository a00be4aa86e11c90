"""The runs that this process serves: their state, changes and reports."""

__all__: list[str] = []
