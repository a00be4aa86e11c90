"""Authentication and authorisation: tokens, roles, enrolled clients."""

__all__: list[str] = []
