"""The round machine: all decisions about a run, as pure functions, without I/O."""

from fedone_sdk.aggregator.rounds.machine import MIN_SAMPLES, ONE_QUERY, RoundMachine

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
