"""The round machine: all decisions about a run, one module per concern, without I/O."""

from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.rules import MIN_SAMPLES, ONE_QUERY

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
