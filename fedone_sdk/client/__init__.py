"""The edge client: a device that scores prompts on its own data. Needs no NumPy.

`AdminClient` manages the runs of an aggregator; it is imported on first use.
"""

from typing import TYPE_CHECKING

from fedone_sdk.client.edge_client import EdgeClient
from fedone_sdk.client.options import (
    ClientEvent,
    EventKind,
    Hooks,
    OnEvent,
    OnlyWhen,
    Outcome,
    RunFit,
    Turn,
    WorkPolicy,
)
from fedone_sdk.client.transport import HttpTransport, Idle, Network, Transport
from fedone_sdk.imports import lazy
from fedone_sdk.spec.sections import RequiredPrivacy

if TYPE_CHECKING:
    from fedone_sdk.client.admin import AdminClient
else:
    # Its messages of runs are modules that a device does not need.
    __getattr__, __dir__ = lazy(globals(), "admin")

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
