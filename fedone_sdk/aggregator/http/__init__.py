"""HTTP without the aggregator's messages: requests, bodies, limits, CORS, TLS, draining."""

__all__: list[str] = []
