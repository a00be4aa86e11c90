"""The set of prompts that a method can choose, and probabilities of their candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .method_state import Floats, Ints

if TYPE_CHECKING:
    from fedone_sdk.vocabulary import Layout

# Largest accepted difference of a sum from 1; rounding to float32 causes at most 6e-8.
_ROUNDING = 1e-6


def project_to_simplex(rows: ArrayLike, *, floor: float = 0.0) -> Floats:
    """Return the nearest rows that sum to 1 with every entry at least `floor`.

    The projection subtracts a threshold from each row, sets negative entries to 0 and adds `floor`.
    The threshold is found by sorting (Duchi et al. 2008, figure 1).

    Args:
        rows: Shape (..., N), finite.
        floor: In [0, 1/N).
    """
    values = np.asarray(rows, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0 or not np.isfinite(values).all():
        raise ValueError("rows must be finite vectors of at least one entry")
    size = values.shape[-1]
    if not 0.0 <= floor < 1.0 / size:
        raise ValueError(f"floor must lie in [0, 1/{size}), not {floor!r}")
    mass = 1.0 - size * floor
    # Subtracting the maximum does not change the projection, and keeps sums small.
    values = values - values.max(axis=-1, keepdims=True)
    descending = np.flip(np.sort(values, axis=-1), axis=-1)
    excess = np.cumsum(descending, axis=-1) - mass
    support = np.count_nonzero(descending * np.arange(1, size + 1) > excess, axis=-1, keepdims=True)
    threshold = np.take_along_axis(excess, support - 1, axis=-1) / support
    return np.maximum(values - threshold, 0.0) + floor


def nearest_probabilities(
    alpha: Floats, *, floor: float, mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the nearest probabilities in float32; a feasible `alpha` is returned bit for bit.

    Float32 rows sum to 1 only up to rounding. A second projection would change their last bits, and
    so `alpha_sha256`.

    Args:
        alpha: Shape (n, N).
        floor: The least probability of a candidate.
        mask: Whether each candidate exists, shape (n, N); the others get the probability 0.
    """
    feasible = not alpha[~mask].any() and alpha[mask].min() >= floor
    feasible = feasible and np.abs(alpha.sum(axis=1) - 1.0).max() <= _ROUNDING
    if feasible:
        return alpha.astype(np.float32)
    if mask.all():
        return project_to_simplex(alpha, floor=floor).astype(np.float32)
    result = np.zeros(alpha.shape, dtype=np.float32)
    for row, exists, values in zip(result, mask, alpha, strict=True):
        row[exists] = project_to_simplex(values[exists], floor=floor)
    return result


Start = Sequence[Sequence[tuple[int, float]]]
"""A warm start: for each position, tokens (candidate indices) and their shares of probability."""


def warm_start(space: Space, start: Start | None) -> Floats:
    """Return initial probabilities, shape (n, N); they are uniform without a warm start.

    Probability that a warm start does not assign is distributed equally over all candidates.

    Raises:
        ValueError: The positions, tokens or shares of `start` are invalid.
    """
    if start is None:
        return space.uniform
    if len(start) != space.prompt_len:
        raise ValueError(f"start must have {space.prompt_len} positions, not {len(start)}")
    shares = np.zeros(space.shape)
    for row, position, size in zip(shares, start, space.sizes, strict=True):
        for token, share in position:
            if not 0 <= token < size:
                raise ValueError(f"start: tokens must lie in [0, {size}), not {token}")
            if not (math.isfinite(share) and 0.0 < share <= 1.0):
                raise ValueError(f"start: a share must lie in (0, 1], not {share!r}")
            row[token] += share
    left = 1.0 - shares.sum(axis=1, keepdims=True)
    if left.min() < -1e-6:
        raise ValueError("start: the shares of a position must sum to at most 1")
    return shares + np.maximum(left, 0.0) * space.uniform


def is_warm_started(alpha: NDArray[np.float32]) -> bool:
    """Return whether an untrained alpha has a warm start, and so is not uniform."""
    existing = np.where(alpha > 0.0, alpha, np.nan)
    return bool((np.nanmax(existing, axis=1) > np.nanmin(existing, axis=1)).any())


# Without `slots=True`, because cached_property needs a __dict__.
@dataclass(frozen=True)
class Space:
    """The prompts of a search: one candidate at each of n positions.

    A prompt is stored as n indices (tokens), one per position. Index j is candidate j of the
    position's slot. The positions of a slot are adjacent and have the same candidates. The paper's
    prompt is one slot of n positions. N is the number of candidates of the largest slot. Arrays of
    shape (n, N) are 0 for candidates that a position does not have (`mask`).

    Attributes:
        layout: For each slot, its number of positions, its number of candidates, and the index of
            its blank candidate (no text), or None.
        width: N; None means the size of the largest slot. A larger N has room for new candidates.
    """

    layout: Layout
    width: int | None = None

    def __post_init__(self) -> None:
        if min((repeat for repeat, _, _ in self.layout), default=0) < 1:
            raise ValueError("a space needs slots, and each slot needs a position")
        if min(self.sizes) < 1 or max(self.sizes) < 2:
            raise ValueError("each position needs a candidate, and at least one position needs two")
        if self.width is not None and self.width < max(self.sizes):
            raise ValueError(f"width must be at least {max(self.sizes)}, not {self.width}")
        for _, size, blank in self.layout:
            if blank is not None and not 0 <= blank < size:
                raise ValueError(f"blank must lie in [0, {size}), not {blank}")

    @classmethod
    def repeated(cls, prompt_len: int, vocab_size: int, blank: int | None = None) -> Space:
        """Return the space of the paper: one slot of n positions and N candidates."""
        return cls.of([(prompt_len, vocab_size, blank)])

    @classmethod
    def of(cls, slots: Iterable[tuple[int, int, int | None]], width: int | None = None) -> Space:
        """Return the space of several slots (`layout`)."""
        return cls(tuple(slots), width)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of candidates of each position."""
        return tuple(size for repeat, size, _ in self.layout for _ in range(repeat))

    @property
    def blanks(self) -> tuple[int | None, ...]:
        """For each position, the index of its blank candidate, or None."""
        return tuple(blank for repeat, _, blank in self.layout for _ in range(repeat))

    @property
    def prompt_len(self) -> int:
        """The number of positions, n."""
        return len(self.sizes)

    @property
    def vocab_size(self) -> int:
        """N: `width`, or the number of candidates of the largest slot."""
        return self.width or max(self.sizes)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of alpha, (n, N)."""
        return self.prompt_len, self.vocab_size

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Which candidates exist, shape (n, N)."""
        mask: NDArray[np.bool_] = np.arange(self.vocab_size) < np.array(self.sizes)[:, None]
        mask.setflags(write=False)
        return mask

    @cached_property
    def uniform(self) -> Floats:
        """Equal probabilities of the candidates of each position, shape (n, N)."""
        uniform: Floats = self.mask / np.array(self.sizes, dtype=np.float64)[:, None]
        uniform.setflags(write=False)
        return uniform

    def admitted(self, alpha: NDArray[np.float32]) -> Floats:
        """Return alpha, where new candidates have the mean weight of their position, (n, N)."""
        weights = alpha.astype(np.float64)
        known = weights > 0.0
        means = weights.sum(axis=1) / known.sum(axis=1)
        return np.where(self.mask & ~known, means[:, None], weights)

    @property
    def reference(self) -> Ints | None:
        """The prompt "no prompt": blanks where possible, candidate 0 elsewhere; shape (n,).

        It is None if no position has a blank.
        """
        if {*self.blanks} == {None}:
            return None
        return np.array([blank or 0 for blank in self.blanks], dtype=np.int64)

    def groups(self) -> Iterator[tuple[list[int], int, int | None]]:
        """Yield the positions of each slot, its number of candidates, and its blank candidate."""
        first = 0
        for repeat, size, blank in self.layout:
            yield [*range(first, first + repeat)], size, blank
            first += repeat

    def holds(self, prompts: Ints) -> bool:
        """Return whether all `prompts`, shape (P, n), are prompts of the space."""
        return bool(((prompts >= 0) & (prompts < np.array(self.sizes))).all())

    def random(self, count: int, rng: np.random.Generator) -> Ints:
        """Return prompts with independent, equally likely candidates, shape (count, n)."""
        return rng.integers(np.array(self.sizes), size=(count, self.prompt_len))

    def compact(self, prompts: Ints) -> Ints:
        """Return the prompts with the blanks of each slot moved to its end, shape (P, n).

        Prompts with the same text become equal.
        """
        result = prompts.copy()
        for positions, _, blank in self.groups():
            if blank is None or len(positions) == 1:
                continue
            part = result[:, positions]
            order = np.argsort(part == blank, axis=1, kind="stable")
            result[:, positions] = np.take_along_axis(part, order, axis=1)
        return result
