"""Evaluation of prompts on a dev split: outcomes, intervals, the verdict of a run."""

from fedone_sdk.evaluation.intervals import interval
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.evaluation.verdict import label_bias

__all__ = ["Outcomes", "interval", "label_bias"]
