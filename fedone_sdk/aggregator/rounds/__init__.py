"""All decisions about a run, made by pure functions without I/O (`machine.RoundMachine`)."""

from fedone_sdk.aggregator.rounds.machine import MIN_SAMPLES, ONE_QUERY, RoundMachine

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
