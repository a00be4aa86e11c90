"""The round machine: pure functions, without I/O, that make all decisions about a run."""

from fedone_sdk.aggregator.rounds.machine import MIN_SAMPLES, ONE_QUERY, RoundMachine

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
