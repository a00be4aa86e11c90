"""FedOne in a Flower federation: a `Strategy` for the ServerApp, a `ClientApp` for the nodes."""

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy
from fedone_sdk.errors import MissingExtraError
from fedone_sdk.flower.data import node_file, node_shard

if TYPE_CHECKING:
    from fedone_sdk.flower._client_app import client_app
    from fedone_sdk.flower._strategy import FedOneStrategy

__all__ = ["FedOneStrategy", "client_app", "node_file", "node_shard"]

_load, __dir__ = lazy(globals(), {"_client_app": "client_app", "_strategy": "FedOneStrategy"})


def __getattr__(name: str) -> object:
    """Import the parts that need Flower on first use; a node does not need the server's part."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingExtraError(f"{__name__}.{name}", extra="flwr") from error
