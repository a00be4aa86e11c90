"""Authentication and authorisation: tokens, roles, enrolled clients."""
