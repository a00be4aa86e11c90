"""The edge side: a device that scores prompts on its own data. Needs no NumPy."""

from fedone_sdk.client.condition import OnlyWhen
from fedone_sdk.client.edge_client import EdgeClient, Outcome
from fedone_sdk.client.events import ClientEvent, EventKind, OnEvent
from fedone_sdk.client.fit import RunFit
from fedone_sdk.client.network import Network
from fedone_sdk.client.thread import EdgeClientThread
from fedone_sdk.client.trainer import Trainer
from fedone_sdk.client.transport import HttpTransport, Idle, Transport
from fedone_sdk.spec.privacy import RequiredPrivacy

__all__ = [
    "ClientEvent",
    "EdgeClient",
    "EdgeClientThread",
    "EventKind",
    "HttpTransport",
    "Idle",
    "Network",
    "OnEvent",
    "OnlyWhen",
    "Outcome",
    "RequiredPrivacy",
    "RunFit",
    "Trainer",
    "Transport",
]
