"""Partitions of examples over clients: IID, Dirichlet, k-shot."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fedone_sdk.data.splitmix import SplitMix64
from fedone_sdk.errors import DataError
from fedone_sdk.task import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The rows of each client.

    Attributes:
        shards: One list of row numbers per client, never empty.
        reused_rows: Whether there are too few rows for all clients, so that some row is in two
            shards (or, if a class has fewer rows than one client needs, twice in one).
    """

    shards: list[list[int]]
    reused_rows: bool


def iid(num_examples: int, num_clients: int, seed: int) -> list[list[int]]:
    """Deal all rows at random; shard sizes differ by at most one."""
    _check_enough(num_examples, num_clients)
    rows = SplitMix64(seed).shuffle(range(num_examples))
    return [rows[client::num_clients] for client in range(num_clients)]


def dirichlet(
    labels: Sequence[Hashable], num_clients: int, alpha: float, seed: int
) -> list[list[int]]:
    """Deal all rows unevenly: each class is split in proportions from Dirichlet(alpha).

    This is the scheme of Hsu et al. (2019) and Yurochkin et al. (2019). They redraw until every
    client has enough rows, which may never end for a small alpha. Here the largest shards give rows
    to those that are too small.

    Raises:
        DataError: There are fewer rows than clients.
        ValueError: An argument is out of range.
    """
    _check_enough(len(labels), num_clients)
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


def k_shot(labels: Sequence[Hashable], num_clients: int, shots: int, seed: int) -> Partition:
    """Give every client `shots` rows of every class.

    Shards are disjoint while rows suffice. After that rows are reused evenly, but never twice by
    one client unless a class has fewer than `shots` rows.
    """
    classes = _rows_by_class(labels)
    _check_shots(len(labels), num_clients, shots)
    return _deal(classes, [dict.fromkeys(classes, shots)] * num_clients, seed)


def partition_clients(
    examples: Sequence[Example],
    *,
    label_of: Callable[[Example], Hashable],
    num_clients: int,
    shots: int | None,
    kind: Literal["iid", "dirichlet"],
    alpha: float = 1.0,
    seed: int,
) -> Partition:
    """Partition examples over clients as a run's ``data`` section describes.

    Args:
        examples: The training rows.
        label_of: The class of a row.
        num_clients: K.
        shots: Rows per class and client; None spreads every row exactly once. With ``dirichlet`` a
            client still gets ``shots * num_classes`` rows, but its class proportions are drawn.
        kind: Whether clients share one class distribution.
        alpha: Dirichlet concentration; ``iid`` ignores it.
        seed: ``0 <= seed < 2**53``.

    Raises:
        DataError: There are too few rows; states how many there are and how many are needed.
        ValueError: An argument is out of range.
    """
    labels = [label_of(example) for example in examples]
    if kind not in ("iid", "dirichlet"):
        raise ValueError(f"kind must be iid or dirichlet, got {kind!r}")
    if shots is None:
        if kind == "iid":
            shards = iid(len(labels), num_clients, seed)
        else:
            shards = dirichlet(labels, num_clients, alpha, seed)
        return Partition(shards=shards, reused_rows=False)
    if kind == "iid":
        return k_shot(labels, num_clients, shots, seed)
    _check_shots(len(labels), num_clients, shots)
    classes, gammas = _rows_by_class(labels), random.Random(seed)
    wanted = []
    for _ in range(num_clients):
        shares = _dirichlet_draw(len(classes), alpha, gammas)
        counts = _round_shares(shares, shots * len(classes))
        wanted.append(dict(zip(classes, counts, strict=True)))
    return _deal(classes, wanted, seed)


class _Deck:
    """The rows of one class, dealt without replacement while they last."""

    def __init__(self, rows: Sequence[int], generator: SplitMix64) -> None:
        self._rows, self._generator = rows, generator
        self._pile = generator.shuffle(rows)
        self.reused = False

    def draw(self, count: int) -> list[int]:
        hand: list[int] = []
        while len(hand) < count:
            if not self._pile:
                self.reused = True
                # Rows of this hand go to the bottom, so that no client gets one twice.
                held = set(hand)
                self._pile = sorted(
                    self._generator.shuffle(self._rows), key=lambda row: row not in held
                )
            hand.append(self._pile.pop())
        return hand


def _deal(
    classes: dict[Hashable, list[int]], wanted: Iterable[dict[Hashable, int]], seed: int
) -> Partition:
    generator = SplitMix64(seed)
    decks = {label: _Deck(rows, generator) for label, rows in classes.items()}
    shards = [
        [row for label, count in counts.items() for row in decks[label].draw(count)]
        for counts in wanted
    ]
    return Partition(shards=shards, reused_rows=any(deck.reused for deck in decks.values()))


def _rows_by_class(labels: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    classes: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        classes.setdefault(label, []).append(row)
    return classes


def _dirichlet_draw(size: int, alpha: float, gammas: random.Random) -> list[float]:
    """Return one draw from the symmetric Dirichlet: normalised Gamma(alpha) variates."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    # Gamma(a) = Gamma(a + 1) * U^(1/a), in logs: for a small alpha the variates would underflow.
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


def _check_enough(num_examples: int, num_clients: int) -> None:
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    if num_examples < num_clients:
        raise DataError(
            f"{num_examples} rows are too few for {num_clients} clients: "
            f"at least {num_clients} are needed"
        )


def _check_shots(num_examples: int, num_clients: int, shots: int) -> None:
    if num_clients < 1 or shots < 1:
        raise ValueError(f"num_clients and shots must be at least 1, got {num_clients} and {shots}")
    if num_examples < 1:
        raise DataError(
            f"0 rows are too few for {num_clients} clients: "
            f"at least 1 is needed, {shots} per class and client to keep shards disjoint"
        )
