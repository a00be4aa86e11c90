"""The mini-batch draw of the wire contract."""

from __future__ import annotations

from fedone_sdk.data.splitmix import SplitMix64


def draw_minibatch(num_examples: int, batch_size: int, seed: int) -> list[int]:
    """Draw the rows of one mini-batch, without replacement.

    ``rows = 0..M-1``; for ``i`` in ``0..min(B, M)-1``: ``j = i + ((next_u64 * (M - i)) >> 64)``,
    swap ``rows[i]`` and ``rows[j]``; where ``next_u64`` is SplitMix64 started at `seed`. The golden
    vectors are in ``tests/vectors/minibatch.json``.

    Args:
        num_examples: M, rows that the client holds.
        batch_size: B.
        seed: ``0 <= seed < 2**53``.

    Returns:
        ``min(B, M)`` distinct row numbers in [0, M), in draw order.

    Raises:
        ValueError: An argument is out of range.
    """
    if num_examples < 1 or batch_size < 1:
        raise ValueError(
            f"num_examples and batch_size must be at least 1, got {num_examples} and {batch_size}"
        )
    return SplitMix64(seed).sample(range(num_examples), batch_size)
