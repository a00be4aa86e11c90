"""HTTP: requests in, answers out, with the guards around them."""

__all__: list[str] = []
