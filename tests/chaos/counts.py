"""Counts over any number of runs."""

from __future__ import annotations

from collections import Counter


class Counts:
    """A dataclass of counts, lists and maxima, whose names begin with ``most_``."""

    def add(self, other: Counts) -> None:
        """Add the counts of other runs."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if name.startswith("most_"):
                setattr(self, name, max(mine, value))
            elif isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)
