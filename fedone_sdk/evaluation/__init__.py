"""Evaluation of prompts on a dev split: outcomes, intervals, the verdict of a run."""

__all__: list[str] = []
