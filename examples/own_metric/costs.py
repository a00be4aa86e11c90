"""A metric of true and predicted label indices, as in scikit-learn."""

from collections.abc import Sequence

MISSED_COMPLAINT, NEEDLESS_CALL = 5.0, 1.0
"""Dollars per complaint classified as praise, and per praise classified as complaint."""


def money_saved(true: Sequence[int], predicted: Sequence[int]) -> float:
    """Dollars per row that the labels save, compared with no follow-up calls.

    Indices are in the order of the task's ``labels``: 0 is a complaint, 1 is praise. The metric is
    only reported; training minimises the task's ``loss``.
    """
    pairs = list(zip(true, predicted, strict=True))
    found, needless = pairs.count((0, 0)), pairs.count((1, 0))
    return (MISSED_COMPLAINT * found - NEEDLESS_CALL * needless) / len(pairs)
