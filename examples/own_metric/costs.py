"""A metric: true and predicted label indices in, a number out, as scikit-learn has it."""

from collections.abc import Sequence

MISSED_COMPLAINT, NEEDLESS_CALL = 5.0, 1.0
"""Dollars: a complaint that is taken for praise, and praise that is taken for a complaint."""


def money_saved(true: Sequence[int], predicted: Sequence[int]) -> float:
    """Dollars per row that the labels save, against calling nobody.

    Indices are in the order of the task's ``labels``: 0 is a complaint, 1 is praise. Only what is
    reported uses the metric; training minimises the task's ``loss``.
    """
    pairs = list(zip(true, predicted, strict=True))
    found, needless = pairs.count((0, 0)), pairs.count((1, 0))
    return (MISSED_COMPLAINT * found - NEEDLESS_CALL * needless) / len(pairs)
