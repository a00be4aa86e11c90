"""`EdgeClient`, a device that scores prompts on its own data; `AdminClient`, for operators."""

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.client.admin import AdminClient
    from fedone_sdk.client.edge_client import EdgeClient
    from fedone_sdk.client.options import *
    from fedone_sdk.client.transport import HttpTransport, Idle, Network, Transport
    from fedone_sdk.spec.sections import RequiredPrivacy
else:
    __getattr__, __dir__ = lazy(globals(), "edge_client options transport admin")

__all__ = [
    "AdminClient",
    "ClientEvent",
    "EdgeClient",
    "EventKind",
    "Hooks",
    "HttpTransport",
    "Idle",
    "Network",
    "OnEvent",
    "OnlyWhen",
    "Outcome",
    "RequiredPrivacy",
    "RunFit",
    "Transport",
    "Turn",
    "WorkPolicy",
]
