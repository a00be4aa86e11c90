"""Metrics for Prometheus and traces for OpenTelemetry."""

__all__: list[str] = []
