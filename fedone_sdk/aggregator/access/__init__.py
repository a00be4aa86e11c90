"""Who may call the aggregator: tokens and roles, enrolled clients, signed requests."""

__all__: list[str] = []
