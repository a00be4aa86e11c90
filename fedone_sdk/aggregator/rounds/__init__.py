"""The round machine: every decision about a run, by concern, without I/O."""

from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.rules import MIN_SAMPLES, ONE_QUERY

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
