"""FedOne in a Flower federation: a `Strategy` for the ServerApp, a `ClientApp` for the nodes."""

from importlib import import_module
from typing import TYPE_CHECKING

from fedone_sdk.errors import MissingExtraError
from fedone_sdk.flower.data import node_file, node_shard

if TYPE_CHECKING:
    from fedone_sdk.flower._client_app import client_app
    from fedone_sdk.flower._strategy import FedOneStrategy

__all__ = ["FedOneStrategy", "client_app", "node_file", "node_shard"]


_HOMES = {"FedOneStrategy": "_strategy", "client_app": "_client_app"}


def __getattr__(name: str) -> object:
    """Import the parts that need Flower on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # A node does not need the server's part.
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingExtraError(f"{__name__}.{name}", extra="flwr") from error
    found: object = getattr(home, name)
    globals()[name] = found
    return found
