"""HTTP: routes, requests and responses, rate limits, TLS, and the OpenAPI document."""
