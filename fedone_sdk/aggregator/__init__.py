"""The server: a round machine without I/O, and the service that runs it."""

from fedone_sdk.aggregator.aggregator import Aggregator, RunHandle
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service

__all__ = ["Aggregator", "RoundMachine", "RunHandle", "ServedRun", "Service"]
