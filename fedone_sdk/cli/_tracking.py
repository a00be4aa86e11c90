"""Trackers of the option `--tracker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedone_sdk.trackers import Tracking


def tracking_of(names: Sequence[str] | None) -> Tracking:
    """Loads trackers by their names.

    Raises:
        MissingExtraError: The extra of a tracker is not installed.
        SpecError: There is no tracker of a name.
    """
    from fedone_sdk.trackers import Tracking, find_tracker

    return Tracking({name: find_tracker(name) for name in names or ()})
