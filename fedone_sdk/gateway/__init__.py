"""`fedone gateway`: a process that holds the model's key, and answers for those with a token."""

from fedone_sdk.gateway.config import CallerLimits, GatewayConfig
from fedone_sdk.gateway.routes import build_app
from fedone_sdk.gateway.service import ModelGateway

__all__ = ["CallerLimits", "GatewayConfig", "ModelGateway", "build_app"]
