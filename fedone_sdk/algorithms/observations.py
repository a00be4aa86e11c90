"""The observed losses of a search: prompts and their losses, per mini-batch.

Shapes: P prompts of n positions, E losses, J mini-batches, K groups of examples (see
`ClassLosses`), C labels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .label_bias import Expansions
from .method import ClassLosses, Holder
from .method_state import Floats, Ints, Memory
from .space import Space

EVALUATIONS_PER_PROMPT = 4
"""Largest mean number of losses per prompt that a search remembers."""

_SHARE_SPREAD = 0.1
"""Prior standard deviation of a class's share; the prior mean is an equal share for each class."""

_CLIENTS_AHEAD = 50
"""Assumed number of future clients, for which the class shares are estimated."""


_FORMS: dict[str, tuple[str, ...]] = {
    "prompts": ("int64", "P", "n"),
    "rows": ("int64", "E"),
    "batches": ("int64", "E"),
    "means": ("float32", "E", "K", "2+C"),
    "scored_at": ("float32", "E", "C"),
    "examples": ("int64", "J", "K"),
    "targets": ("float32", "J", "K", "C"),
    "trust": ("float64", "J"),
    "biases": ("float64", "P", "C"),
    "clients": ("int64", "J"),
}
"""The type and the axes of each array of `Observations`."""


# Without `slots=True`, because cached_property needs a __dict__.
@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Distinct prompts with their remembered losses.

    The weight of a class in a prompt's mean loss (`class_share`) is its share in the examples of
    all clients so far. If clients have different class shares, the first clients are a
    poor sample. The weights are therefore shrunk towards equal weights.

    Attributes:
        prompts: Shape (P, n), int64.
        rows: The row in `prompts` that each loss belongs to, shape (E,), int64.
        batches: The mini-batch of each loss, shape (E,), int64, ascending.
        means: Loss and derivatives, as in `ClassLosses.means`, shape (E, K, 2 + C), float32.
        scored_at: The label bias that each loss was scored with, nats, shape (E, C), float32.
        examples: The number of examples of each group and mini-batch, shape (J, K), int64.
        targets: The shares of the labels among these examples, shape (J, K, C), float32.
        trust: The weight of each mini-batch, in (0, 1], shape (J,), float64.
        biases: The best label bias of each prompt so far, nats, shape (P, C), float64.
        clients: The client of each mini-batch, shape (J,), int64. For client c, the number is c if
            the mini-batch has all rows of the client, otherwise ``-2 - c``; -1 means unknown.
    """

    prompts: Ints
    rows: Ints
    batches: Ints
    means: NDArray[np.float32]
    scored_at: NDArray[np.float32]
    examples: Ints
    targets: NDArray[np.float32]
    trust: Floats
    biases: Floats
    clients: Ints

    @classmethod
    def empty(cls, prompt_len: int, groups: int = 1, labels: int = 1) -> Self:
        """Return observations without prompts, of K groups and C labels."""
        widths = {"n": prompt_len, "K": groups, "2+C": 2 + labels, "C": labels}
        return cls(
            **{
                name: np.empty((0, *(widths[axis] for axis in axes)), dtype)
                for name, (dtype, _, *axes) in _FORMS.items()
            }
        )

    @classmethod
    def remembered(cls, memory: Memory, space: Space, groups: int = 1, labels: int = 1) -> Self:
        """Return the observations in a state's memory, of K groups and C labels.

        The memory is checked, because it may come from a client.

        Raises:
            ValueError: `memory` is not the memory of a search.
        """
        prompt_len = space.prompt_len
        empty = cls.empty(prompt_len, groups, labels)
        if not memory:
            return empty
        names = _FORMS.keys()
        if missing := sorted(names - memory.keys()):
            raise ValueError(f"not the memory of a search: {', '.join(missing)} is missing")
        arrays = {name: memory[name] for name in names}
        # `size` and not `len`: a client may send an array without axes.
        size, evaluations = arrays["prompts"].size // prompt_len, arrays["rows"].size
        clients = arrays["examples"].size // groups
        lengths = {"P": size, "E": evaluations, "J": clients}
        if not all(
            arrays[name].dtype == dtype
            and arrays[name].shape == (lengths[first], *getattr(empty, name).shape[1:])
            for name, (dtype, first, *_) in _FORMS.items()
        ):
            raise ValueError(f"the memory's arrays do not fit prompts of {prompt_len} positions")
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise ValueError("the memory's numbers must be finite")
        if not (_covers(arrays["rows"], size) and _covers(arrays["batches"], clients)):
            raise ValueError("every prompt and mini-batch of a memory must have a loss")
        if (np.diff(arrays["batches"]) < 0).any():
            raise ValueError("a memory's mini-batches must be in ascending order")
        if not space.holds(arrays["prompts"]):
            raise ValueError("a memory must not have prompts with candidates that do not exist")
        if len(np.unique(arrays["prompts"], axis=0)) != size:
            raise ValueError("a memory must not have a prompt twice")
        if len(np.unique(arrays["batches"] * size + arrays["rows"])) != evaluations:
            raise ValueError("a mini-batch of a memory must not have two losses of a prompt")
        if arrays["examples"].min(initial=0) < 0:
            raise ValueError("a memory's numbers of examples must not be negative")
        if not arrays["examples"].any(axis=1).all():
            raise ValueError("every mini-batch of a memory must have examples")
        if arrays["trust"].min(initial=1.0) <= 0.0 or arrays["trust"].max(initial=1.0) > 1.0:
            raise ValueError("a memory's trust must lie in (0, 1]")
        return cls(**arrays)

    def memory(self) -> dict[str, NDArray[np.generic]]:
        """Return the observations as entries of a state's memory."""
        return {name: getattr(self, name) for name in _FORMS}

    def with_batch(self, prompts: Ints, losses: ClassLosses, holder: Holder | None = None) -> Self:
        """Return the observations with one mini-batch's losses added.

        Args:
            prompts: Shape (I, n). A repeated prompt counts once.
            losses: The losses of the prompts.
            holder: The client that scored them; None if unknown.

        Raises:
            ValueError: The losses have other groups or labels than the observations.
        """
        if losses.means.shape[1:] != self.means.shape[1:]:
            raise ValueError(
                f"losses must be of shape (I, {', '.join(map(str, self.means.shape[1:]))}), "
                f"not {losses.means.shape}"
            )
        row_of = {prompt.tobytes(): row for row, prompt in enumerate(self.prompts)}
        rows = [row_of.setdefault(prompt.tobytes(), len(row_of)) for prompt in prompts]
        new = (0, len(row_of) - len(self.prompts))
        distinct = np.pad(self.prompts, (new, (0, 0)))
        distinct[rows] = prompts
        biases = np.pad(self.biases, (new, (0, 0)))
        biases[rows] = losses.biases
        met, first = np.unique(rows, return_index=True)
        client = -1
        if holder is not None:
            client = holder.client if holder.all_rows else -2 - holder.client
        return replace(
            self,
            prompts=distinct,
            rows=np.append(self.rows, met),
            batches=np.append(self.batches, np.full(len(met), len(self.examples))),
            means=np.concatenate([self.means, losses.means[first].astype(np.float32)]),
            scored_at=np.concatenate([self.scored_at, losses.biases[first].astype(np.float32)]),
            examples=np.concatenate([self.examples, losses.counts[None]]),
            targets=np.concatenate([self.targets, losses.targets[None].astype(np.float32)]),
            trust=np.append(self.trust, 1.0),
            biases=biases,
            clients=np.append(self.clients, client),
        )

    def of(self, prompts: Ints, evaluations: Ints) -> Self:
        """Return some of the losses, with the prompts and mini-batches that they belong to.

        Args:
            prompts: Row numbers of the prompts, in the order of the result.
            evaluations: Indices of the losses, ascending.
        """
        prompts = prompts[np.isin(prompts, self.rows[evaluations])]
        place = np.zeros(len(self.prompts), dtype=np.int64)
        place[prompts] = np.arange(len(prompts))
        batches, renumbered = np.unique(self.batches[evaluations], return_inverse=True)
        kept = {"P": prompts, "E": evaluations, "J": batches}
        parts = {name: getattr(self, name)[kept[first]] for name, (_, first, *_) in _FORMS.items()}
        numbers = {"rows": place[parts["rows"]], "batches": renumbered.astype(np.int64)}
        return replace(self, **parts | numbers)

    def latest(self, size: int) -> Self:
        """Return the last mini-batches, with at most `size` distinct prompts in all."""
        if len(self.prompts) <= size:
            return self
        # The first occurrence of each prompt, counted from the end.
        first = np.unique(self.rows[::-1], return_index=True)[1]
        distinct = np.cumsum(np.bincount(first, minlength=len(self.rows)))
        backwards = self.batches[::-1]
        inside = np.flatnonzero(distinct <= size)
        oldest = backwards[inside[-1]]
        # A mini-batch is kept whole or not at all.
        if inside[-1] + 1 < len(backwards) and backwards[inside[-1] + 1] == oldest:
            oldest += 1
        evaluations = np.flatnonzero(self.batches >= min(oldest, self.batches[-1]))
        return self.of(np.unique(self.rows[evaluations]), evaluations)

    def remembering(self, prompts: Ints, size: int) -> Self:
        """Return the prompts of the given rows, in this order, and their last `size` losses."""
        evaluations = np.flatnonzero(np.isin(self.rows, prompts))[-size:]
        return self.of(prompts, evaluations)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Whether examples of each class were observed, shape (K,)."""
        return self.examples.sum(axis=0) > 0

    @cached_property
    def class_share(self) -> Floats:
        """The estimated share of each class in all examples, shape (K,)."""
        equal = 1.0 / len(self.seen)
        if not len(self.examples):
            return np.full(self.seen.shape, equal)
        each = self.examples / self.examples.sum(axis=1, keepdims=True)
        of = np.unique(self._samples, return_inverse=True)[1]
        totals = np.zeros((of.max() + 1, each.shape[1]))
        np.add.at(totals, of, each)
        shares = totals / np.bincount(of)[:, None]
        clients, mean, square = len(shares), shares.mean(axis=0), (shares**2).mean(axis=0)
        # The variance about equal shares is used, because the variance about the mean is too small
        # if a few clients are similar by chance.
        from_equal = square - 2.0 * equal * mean + equal**2
        varies = float((from_equal / clients + (square - mean**2) / _CLIENTS_AHEAD).max())
        believed = _SHARE_SPREAD**2 / (_SHARE_SPREAD**2 + varies)
        return equal + believed * (mean - equal)

    @property
    def _samples(self) -> Ints:
        """A number per mini-batch, equal for mini-batches of the same rows, shape (J,)."""
        numbers = np.arange(len(self.clients))
        return np.where(self.clients < 0, -1 - numbers, self.clients)

    @cached_property
    def trusted_evaluations(self) -> Floats:
        """How often each prompt was scored on examples of each class, shape (P, K).

        A mini-batch counts with its trust as weight. Mini-batches of the same rows count once.
        """
        of = np.unique(self._samples, return_inverse=True)[1]
        met = np.zeros((len(self.prompts), of.max(initial=0) + 1, self.examples.shape[1]))
        trusted = self.trust[:, None] * (self.examples > 0)
        np.maximum.at(met, (self.rows, of[self.batches]), trusted[self.batches])
        return met.sum(axis=1)

    @cached_property
    def expansions(self) -> Expansions:
        """The losses as functions of the label bias, shape (E, K)."""
        targets = self.targets[self.batches].astype(np.float64)
        return Expansions.of(self.means, targets, self.scored_at[:, None])

    @cached_property
    def losses(self) -> Floats:
        """The losses of each class with their prompts' best label biases, nats, shape (E, K)."""
        return self.expansions.at(self.biases[self.rows][:, None]).losses

    def biases_for(self, prompts: Ints) -> Floats:
        """Return the best label biases of prompts, to score them with; nats, shape (I, C).

        A new prompt gets the mean bias of the observed prompts, weighted by number of losses.
        """
        if not len(self.prompts):
            return np.zeros((len(prompts), self.biases.shape[1]))
        biases = np.tile(self.biases[self.rows].mean(axis=0), (len(prompts), 1))
        for place, prompt in enumerate(prompts):
            if (row := self.row(prompt)) is not None:
                biases[place] = self.biases[row]
        return biases

    def last_batches(self) -> Ints:
        """Return the last mini-batch of each prompt, shape (P,)."""
        last = np.zeros(len(self.prompts), dtype=np.int64)
        last[self.rows] = self.batches  # Batches ascend, so the last value remains.
        return last

    def row(self, prompt: Ints | None) -> int | None:
        """Return the row of a prompt; None if it was not observed."""
        if prompt is None:
            return None
        rows = np.flatnonzero((self.prompts == prompt).all(axis=1))
        return int(rows[0]) if len(rows) else None


def _covers(numbers: Ints, count: int) -> bool:
    """Return whether the numbers contain every number of range(count), and no other number."""
    if not numbers.size:
        return count == 0
    in_range = numbers.min() >= 0 and numbers.max() < count
    return bool(in_range and np.bincount(numbers, minlength=count).all())


class Standings(NamedTuple):
    """Mean losses of a position's candidates, at the best label biases of their prompts.

    Losses of candidates that were not scored are NaN.

    Attributes:
        examples: Number of examples that were scored with each candidate, float64.
        losses: Mean loss with each candidate; all groups of examples have the same weight.
        by_class: Mean loss with each candidate in each of the K groups of examples.
    """

    examples: Floats
    losses: Floats
    by_class: Floats


def standings(memory: Memory, position: int, size: int) -> Standings:
    """Return the mean losses of one position's candidates, over all prompts that have them."""
    if not memory:
        return Standings(np.zeros(size), np.full(size, np.nan), np.full((size, 1), np.nan))
    observed = _read(memory)
    candidate = observed.prompts[observed.rows, position]
    examples = observed.examples[observed.batches].astype(np.float64)
    counts, sums = np.zeros((2, size, examples.shape[1]))
    np.add.at(counts, candidate, examples)
    np.add.at(sums, candidate, examples * observed.losses)
    met = counts > 0.0
    by_class = np.where(met, sums / np.where(met, counts, 1.0), np.nan)
    mixed = np.where(met, by_class, 0.0).sum(axis=1) / np.maximum(met.sum(axis=1), 1)
    return Standings(
        examples=counts.sum(axis=1),
        losses=np.where(met.any(axis=1), mixed, np.nan),
        by_class=by_class,
    )


def clusters(memory: Memory, position: int) -> Counter[int]:
    """Return the number of clients for which each candidate of a position is best.

    A client's best candidate is that of the deployable prompt, unless another is clearly better.
    Clearly better means that both were scored on at least two of the client's mini-batches, and
    that the mean gain exceeds its standard error.
    """
    if not memory:
        return Counter()
    observed = _read(memory)
    client = np.where(observed.clients < -1, -2 - observed.clients, observed.clients)
    examples = observed.examples[observed.batches]
    losses = (examples * observed.losses).sum(axis=1) / examples.sum(axis=1)
    candidate = observed.prompts[observed.rows, position]
    counts, sums = np.zeros((2, len(client), int(candidate.max()) + 1))
    np.add.at(counts, (observed.batches, candidate), 1.0)
    np.add.at(sums, (observed.batches, candidate), losses)
    deployed = int(observed.prompts[0, position])
    means = sums / np.maximum(counts, 1.0)
    both = (counts > 0.0) & (counts[:, [deployed]] > 0.0)
    gains = np.where(both, means[:, [deployed]] - means, 0.0)
    best = Counter[int]()
    for number in np.unique(client[client >= 0]):
        gain, count = gains[client == number], both[client == number].sum(axis=0)
        mean = gain.sum(axis=0) / np.maximum(count, 1)
        spread = np.maximum((gain**2).sum(axis=0) / np.maximum(count, 1) - mean**2, 0.0)
        clear = (count > 1) & (mean > np.sqrt(spread / np.maximum(count - 1, 1)))
        mean[~clear] = 0.0
        best[int(mean.argmax()) if clear.any() else deployed] += 1
    return best


def _read(memory: Memory) -> Observations:
    return Observations(**{name: memory[name] for name in _FORMS})
