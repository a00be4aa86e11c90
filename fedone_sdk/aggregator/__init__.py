"""The server. Handlers without I/O decide about runs; a service applies their decisions.

Other packages use only the names that this module exports.
"""

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.aggregator.aggregator import Aggregator, RunHandle
    from fedone_sdk.aggregator.config import RunToServe, ServeConfig
    from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
    from fedone_sdk.aggregator.rounds import RoundMachine
    from fedone_sdk.aggregator.rounds.run_state import snapshot_sha256
    from fedone_sdk.aggregator.runs.changes import Change
    from fedone_sdk.aggregator.runs.run_view import exported_run, reading
    from fedone_sdk.aggregator.runs.served_run import ServedRun
    from fedone_sdk.aggregator.service import Service
    from fedone_sdk.aggregator.telemetry import Observers
else:
    # Imported lazily: an `Aggregator` with a store in memory needs no database packages.
    __getattr__, __dir__ = lazy(
        globals(),
        "aggregator dispatch.client_pool rounds rounds.run_state runs.changes runs.run_view "
        "service telemetry config",
    )

__all__ = [
    "Aggregator",
    "Change",
    "Observers",
    "RetryLater",
    "RoundMachine",
    "RunHandle",
    "RunToServe",
    "ServeConfig",
    "ServedRun",
    "Service",
    "exported_run",
    "reading",
    "snapshot_sha256",
]
