"""HTTP infrastructure: requests, bodies, limits, CORS, TLS, drain."""

__all__: list[str] = []
