"""Reproducible draws of rows: SplitMix64, mini-batches, and partitions over clients."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from fedone_sdk.errors import DataError

_MASK = 2**64 - 1
_T = TypeVar("_T")


class SplitMix64:
    """The 64-bit generator of Steele, Lea and Flood (2014), with draws that only use integers.

    It is five lines of code in any language. It needs no floating-point numbers, so clients in all
    languages draw the same mini-batches.
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
    """Draw the rows of one mini-batch of size B from M rows, without replacement.

    ``rows = 0..M-1``; for ``i`` in ``0..min(B, M)-1``: ``j = i + ((next_u64 * (M - i)) >> 64)``,
    swap ``rows[i]`` and ``rows[j]``. The numbers ``next_u64`` come from SplitMix64 with `seed`.
    ``tests/vectors/minibatch.json`` has examples for other implementations.

    Raises:
        ValueError: An argument is out of range.
    """
    if num_examples < 1 or batch_size < 1:
        raise ValueError(
            f"num_examples and batch_size must be at least 1, got {num_examples} and {batch_size}"
        )
    return SplitMix64(seed).sample(range(num_examples), batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The rows of each client.

    Attributes:
        shards: One list of row numbers per client, never empty.
        reused_rows: Whether a row is used twice, because there are too few rows for all clients.
    """

    shards: list[list[int]]
    reused_rows: bool


def iid(num_examples: int, num_clients: int, seed: int) -> list[list[int]]:
    """Distribute all rows at random; shard sizes differ by at most one."""
    _check_enough(num_examples, num_clients, least=num_clients)
    rows = SplitMix64(seed).shuffle(range(num_examples))
    return [rows[client::num_clients] for client in range(num_clients)]


def dirichlet(
    labels: Sequence[Hashable], num_clients: int, alpha: float, seed: int
) -> list[list[int]]:
    """Distribute all rows; each class is split in proportions from Dirichlet(alpha).

    This is the scheme of Hsu et al. (2019) and Yurochkin et al. (2019), with one change. The
    authors redraw until every client has enough rows, which may never happen for a small alpha.
    Here clients without rows get rows of the clients with the most rows.

    Raises:
        DataError: There are fewer rows than clients.
    """
    _check_enough(len(labels), num_clients, least=num_clients)
    generator, gammas = SplitMix64(seed), random.Random(seed)
    shards: list[list[int]] = [[] for _ in range(num_clients)]
    for rows in _rows_by_class(labels).values():
        shares = _dirichlet_draw(num_clients, alpha, gammas)
        ends = [round(len(rows) * share) for share in accumulate(shares)]
        ends[-1] = len(rows)  # the shares' float sum may fall short of 1
        shuffled = generator.shuffle(rows)
        for shard, start, end in zip(shards, [0, *ends], ends, strict=False):
            shard += shuffled[start:end]
    _level(shards)
    return shards


def partition_clients(
    labels: Sequence[Hashable],
    *,
    num_clients: int,
    shots: int | None = None,
    alpha: float | None = None,
    seed: int,
) -> Partition:
    """Partition rows over clients as a run's ``data`` section describes.

    With `shots`, clients share no rows as long as there are enough rows. Otherwise rows are reused
    evenly. A client gets a row twice only if a class has fewer rows than the client needs.

    Args:
        labels: The class of each row.
        num_clients: K, the number of clients.
        shots: Rows per class and client; None distributes every row once. If `alpha` is also set,
            a client gets ``shots * num_classes`` rows with random class proportions.
        alpha: Dirichlet concentration of the clients' class proportions; None gives all clients
            the same proportions.
        seed: ``0 <= seed < 2**53``.

    Raises:
        DataError: There are too few rows.
    """
    if shots is None:
        if alpha is None:
            shards = iid(len(labels), num_clients, seed)
        else:
            shards = dirichlet(labels, num_clients, alpha, seed)
        return Partition(shards=shards, reused_rows=False)
    _check_enough(len(labels), num_clients, least=1)
    classes, gammas = _rows_by_class(labels), random.Random(seed)
    wanted = [dict.fromkeys(classes, shots) for _ in range(num_clients)]
    if alpha is not None:
        for counts in wanted:
            shares = _dirichlet_draw(len(classes), alpha, gammas)
            rounded = _round_shares(shares, shots * len(classes))
            counts.update(zip(classes, rounded, strict=True))
    generator = SplitMix64(seed)
    decks = {label: _Deck(rows, generator) for label, rows in classes.items()}
    shards = [
        [row for label, count in counts.items() for row in decks[label].draw(count)]
        for counts in wanted
    ]
    return Partition(shards=shards, reused_rows=any(deck.reused for deck in decks.values()))


class _Deck:
    """Draws the rows of one class without replacement, and starts again when all were drawn."""

    def __init__(self, rows: Sequence[int], generator: SplitMix64) -> None:
        self._rows, self._generator = rows, generator
        self._unused = generator.shuffle(rows)
        self.reused = False

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._unused:
                self.reused = True
                shuffled, client_rows = self._generator.shuffle(self._rows), set(drawn)
                # Rows that the client already has are drawn last, to avoid duplicates.
                self._unused = sorted(shuffled, key=lambda row: row not in client_rows)
            drawn.append(self._unused.pop())
        return drawn


def _rows_by_class(labels: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    classes: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        classes.setdefault(label, []).append(row)
    return classes


def _dirichlet_draw(size: int, alpha: float, gammas: random.Random) -> list[float]:
    """Return one draw from the symmetric Dirichlet: normalised Gamma(alpha) variates."""
    # Gamma(a) = Gamma(a + 1) * U^(1/a), in logarithms, because U^(1/a) underflows for small a.
    logs = [
        math.log(gammas.gammavariate(alpha + 1, 1.0)) + math.log(1.0 - gammas.random()) / alpha
        for _ in range(size)
    ]
    highest = max(logs)
    weights = [math.exp(value - highest) for value in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _round_shares(shares: Sequence[float], total: int) -> list[int]:
    counts = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * total)
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _level(shards: list[list[int]]) -> None:
    """Move rows, in place, from the largest shards to the empty ones."""
    largest = [(-len(shard), client) for client, shard in enumerate(shards)]
    heapq.heapify(largest)
    for shard in shards:
        if not shard:
            size, donor = largest[0]
            shard.append(shards[donor].pop())
            heapq.heapreplace(largest, (size + 1, donor))


def _check_enough(num_examples: int, num_clients: int, least: int) -> None:
    if num_examples < least:
        raise DataError(
            f"{num_examples} rows are too few for {num_clients} clients: at least {least} "
            f"{'is' if least == 1 else 'are'} needed"
        )
