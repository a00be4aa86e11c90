"""Experiment trackers: send a run's rounds and result to MLflow, TensorBoard, W&B or your own."""

from fedone_sdk.trackers.tracker import (
    GROUP,
    TrackedRun,
    Tracker,
    TrackerFactory,
    Tracking,
    find_tracker,
    params_of,
)

__all__ = [
    "GROUP",
    "TrackedRun",
    "Tracker",
    "TrackerFactory",
    "Tracking",
    "find_tracker",
    "params_of",
]
