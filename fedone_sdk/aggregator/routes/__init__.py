"""HTTP routes of the service: parse a request, call the service, return its result."""

from fedone_sdk.aggregator.routes.app import ROUTES, build_app, build_metrics_app
from fedone_sdk.aggregator.routes.route import MAX_BODY_BYTES, Access, Route

__all__ = ["Access", "MAX_BODY_BYTES", "ROUTES", "Route", "build_app", "build_metrics_app"]
