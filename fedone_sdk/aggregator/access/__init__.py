"""Authentication and authorisation: tokens, roles, enrolled clients, signed requests."""

__all__: list[str] = []
