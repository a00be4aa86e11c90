"""Evaluation of prompts on a dev split: outcomes, intervals, the verdict of a run."""

from fedone_sdk.evaluation.intervals import confusion, difference, interval
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.evaluation.verdict import judge, label_bias, sentence

__all__ = ["Outcomes", "confusion", "difference", "interval", "judge", "label_bias", "sentence"]
