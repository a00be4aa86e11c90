"""Comparison of methods over seeds on the user's task and model: paired trials, stored on disk."""

from fedone_sdk.comparison.comparison import Comparison, affordable, run_trials
from fedone_sdk.comparison.costs import Costs, TotalGuard, costs_of, is_free
from fedone_sdk.comparison.entrants import (
    BASELINES,
    METHODS,
    Entrant,
    default_names,
    entrants_of,
)
from fedone_sdk.comparison.records import Point, TrialFile, TrialRecord
from fedone_sdk.comparison.results import Results, Standing, results_of
from fedone_sdk.comparison.statistics import Estimate, difference
from fedone_sdk.comparison.trials import Trial, run_trial
from fedone_sdk.local.plan import training_queries

__all__ = [
    "BASELINES",
    "Comparison",
    "Costs",
    "Entrant",
    "Estimate",
    "METHODS",
    "Point",
    "Results",
    "Standing",
    "TotalGuard",
    "Trial",
    "TrialFile",
    "TrialRecord",
    "affordable",
    "costs_of",
    "default_names",
    "difference",
    "entrants_of",
    "is_free",
    "results_of",
    "run_trial",
    "run_trials",
    "training_queries",
]
