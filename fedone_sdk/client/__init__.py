"""The edge side: a device that scores prompts on its own data. Needs no NumPy."""

from fedone_sdk.client.edge_client import EdgeClient, Outcome
from fedone_sdk.client.transport import HttpTransport, Idle, Transport

__all__ = ["EdgeClient", "HttpTransport", "Idle", "Outcome", "Transport"]
