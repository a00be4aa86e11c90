"""Experiment trackers: a run's rounds and result go to MLflow, TensorBoard, W&B or one of yours."""

from fedone_sdk.trackers.tracker import (
    GROUP,
    TrackedRun,
    Tracker,
    TrackerFactory,
    find_tracker,
    params_of,
)
from fedone_sdk.trackers.tracking import Tracking

__all__ = [
    "GROUP",
    "TrackedRun",
    "Tracker",
    "TrackerFactory",
    "Tracking",
    "find_tracker",
    "params_of",
]
