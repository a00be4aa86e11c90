"""Experiment trackers: send a run's rounds and result to MLflow, TensorBoard, W&B or your own."""

from fedone_sdk.trackers.tracker import TrackedRun, Tracker, TrackerFactory, Tracking, find_tracker

__all__ = ["TrackedRun", "Tracker", "TrackerFactory", "Tracking", "find_tracker"]
