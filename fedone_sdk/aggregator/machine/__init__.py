"""The round machine: every decision about a run, by concern."""

from fedone_sdk.aggregator.machine.machine import RoundMachine
from fedone_sdk.aggregator.machine.rules import MIN_SAMPLES, ONE_QUERY

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]
