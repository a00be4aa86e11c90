"""The HTTP face of the service: parse, call, answer. Nothing is decided here."""

from fedone_sdk.aggregator.routes.app import build_app, build_metrics_app, routes
from fedone_sdk.aggregator.routes.route import MAX_BODY_BYTES, Access, Route

__all__ = ["Access", "MAX_BODY_BYTES", "Route", "build_app", "build_metrics_app", "routes"]
