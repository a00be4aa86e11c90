"""The decisions about a run: pure functions without I/O, called handlers (see `RoundMachine`)."""

from fedone_sdk.aggregator.rounds.machine import MIN_SAMPLES, ONE_QUERY, RoundMachine

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
