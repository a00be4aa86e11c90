"""Random draws that are the same in every language: SplitMix64, and mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_MASK = 2**64 - 1
_T = TypeVar("_T")


class SplitMix64:
    """The 64-bit generator of Steele, Lea and Flood (2014), with draws defined in integers.

    It is five lines in any language and needs no floating point, so that a client in any language
    draws the same mini-batch.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**53:
            raise ValueError(f"seed must be in [0, 2^53), got {seed}")
        self._state = int(seed)

    def next_u64(self) -> int:
        """Return the next integer, uniform in [0, 2^64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """Return an integer in [0, bound), uniform up to a bias of at most bound / 2^64."""
        return (self.next_u64() * bound) >> 64

    def sample(self, items: Sequence[_T], count: int) -> list[_T]:
        """Draw without replacement, by a Fisher-Yates shuffle that stops after `count` swaps.

        Returns:
            ``min(count, len(items))`` items in draw order.
        """
        pool = list(items)
        count = min(count, len(pool))
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def shuffle(self, items: Sequence[_T]) -> list[_T]:
        """Return all items in random order; the input is not changed."""
        return self.sample(items, len(items))


def draw_minibatch(num_examples: int, batch_size: int, seed: int) -> list[int]:
    """Draw the rows of one mini-batch, without replacement.

    ``rows = 0..M-1``; for ``i`` in ``0..min(B, M)-1``: ``j = i + ((next_u64 * (M - i)) >> 64)``,
    swap ``rows[i]`` and ``rows[j]``; where ``next_u64`` is SplitMix64 started at `seed`. The golden
    vectors are in ``tests/vectors/minibatch.json``.

    Raises:
        ValueError: An argument is out of range.
    """
    if num_examples < 1 or batch_size < 1:
        raise ValueError(
            f"num_examples and batch_size must be at least 1, got {num_examples} and {batch_size}"
        )
    return SplitMix64(seed).sample(range(num_examples), batch_size)
