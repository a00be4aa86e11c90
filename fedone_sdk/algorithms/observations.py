"""What was paid for: prompts and their losses, mini-batch by mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .method import ClassLosses
from .space import Space
from .state import Memory

__all__ = ["LOOKS", "Observations"]

LOOKS = 4
"""Losses that are remembered, for each prompt that is: leaders have more, most others one."""

_SHARE_SPREAD = 0.1
"""Prior standard deviation of a class's share about equal shares."""

_CLIENTS_AHEAD = 50
"""Clients that the prompt is for, in addition to those that were met: where clients differ,
their classes will be shared out otherwise."""


# No slots: what follows from the arrays is kept with them.
@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Distinct prompts with the losses that are remembered of them.

    Classes are put together by their share among all clients seen so far, not by those that a
    prompt happened to meet: a prompt that was only tried on positive reviews is no better for it.
    Where each client holds other classes, a few of them say little of all: the share is shrunk to
    equal ones.

    Attributes:
        prompts: Shape (P, n), int64.
        rows: Which prompt a loss is of, shape (E,), int64.
        batches: Which mini-batch it is from, shape (E,), int64, rising.
        means: Mean losses over the examples of a class, were a bias added, shape (E, C, G),
            float32; C and G are 1 where losses come neither by class nor by bias.
        examples: Examples of each class in those mini-batches, shape (J, C), int64.
        trust: The weight of each mini-batch, in (0, 1], shape (J,), float64.
        biases: The best label bias of each prompt so far, nats, shape (P, C), float64.
        shares: Sums over all mini-batches of each class's share, and of its square; shape (2, C).
    """

    prompts: NDArray[np.int64]
    rows: NDArray[np.int64]
    batches: NDArray[np.int64]
    means: NDArray[np.float32]
    examples: NDArray[np.int64]
    trust: NDArray[np.float64]
    biases: NDArray[np.float64]
    shares: NDArray[np.float64]

    @classmethod
    def empty(cls, prompt_len: int, classes: int = 1, points: int = 1) -> Self:
        """Return observations of no prompts.

        Args:
            prompt_len: n.
            classes: C.
            points: G.
        """
        return cls(
            prompts=np.empty((0, prompt_len), dtype=np.int64),
            rows=np.empty(0, dtype=np.int64),
            batches=np.empty(0, dtype=np.int64),
            means=np.empty((0, classes, points), dtype=np.float32),
            examples=np.empty((0, classes), dtype=np.int64),
            trust=np.empty(0),
            biases=np.empty((0, classes)),
            shares=np.zeros((2, classes)),
        )

    @classmethod
    def remembered(cls, memory: Memory, space: Space, classes: int = 1, points: int = 1) -> Self:
        """Return the observations that `memory` holds; an empty memory holds none.

        Args:
            memory: Of a state; it may come from a client.
            space: What prompts are made of.
            classes: C.
            points: G.

        Raises:
            ValueError: It is not such a memory.
        """
        prompt_len = space.prompt_len
        empty = cls.empty(prompt_len, classes, points)
        if not memory:
            return empty
        names = empty.memory().keys()
        if missing := sorted(names - memory.keys()):
            raise ValueError(f"not the memory of a search: {', '.join(missing)} missing")
        own = {name: memory[name] for name in names}
        # By their numbers, as it may come from a client: what has no rows at all has no length.
        size, looks = own["prompts"].size // prompt_len, own["rows"].size
        clients = own["examples"].size // classes
        shapes = {
            "prompts": (size, prompt_len),
            "rows": (looks,),
            "batches": (looks,),
            "means": (looks, classes, points),
            "examples": (clients, classes),
            "trust": (clients,),
            "biases": (size, classes),
            "shares": (2, classes),
        }
        fits = all(
            own[name].shape == shape and own[name].dtype == getattr(empty, name).dtype
            for name, shape in shapes.items()
        )
        if not fits:
            raise ValueError(f"the memory's arrays do not fit prompts of {prompt_len} tokens")
        if not all(np.isfinite(array).all() for array in own.values()):
            raise ValueError("the memory's numbers must be finite")
        if not (_all_there(own["rows"], size) and _all_there(own["batches"], clients)):
            raise ValueError("every prompt and mini-batch of a memory has a loss")
        if (np.diff(own["batches"]) < 0).any():
            raise ValueError("a memory's mini-batches stand in their order")
        if not space.holds(own["prompts"]):
            raise ValueError("the memory's tokens must be candidates of their positions")
        if len(np.unique(own["prompts"], axis=0)) != size:
            raise ValueError("the prompts of a memory differ")
        if len(np.unique(own["batches"] * size + own["rows"])) != looks:
            raise ValueError("a mini-batch of a memory has one loss of a prompt")
        if own["examples"].min(initial=0) < 0 or own["shares"].min() < 0:
            raise ValueError("a memory's counts are not negative")
        if not own["examples"].any(axis=1).all():
            raise ValueError("every mini-batch of a memory has examples")
        if own["trust"].min(initial=1.0) <= 0.0 or own["trust"].max(initial=1.0) > 1.0:
            raise ValueError("a memory's trust lies in (0, 1]")
        return cls(**own)

    def memory(self) -> dict[str, NDArray[np.generic]]:
        """Return the observations as a part of a state's memory."""
        return {
            "prompts": self.prompts,
            "rows": self.rows,
            "batches": self.batches,
            "means": self.means,
            "examples": self.examples,
            "trust": self.trust,
            "biases": self.biases,
            "shares": self.shares,
        }

    def with_batch(self, prompts: NDArray[np.int64], losses: ClassLosses) -> Self:
        """Return the observations with one mini-batch's losses added.

        Args:
            prompts: Shape (I, n). Equal ones have equal losses there, and count once.
            losses: Of these prompts, in their order.

        Raises:
            ValueError: The losses have other classes or biases than the observations.
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
        share = losses.counts / losses.counts.sum()
        met, first = np.unique(rows, return_index=True)
        return replace(
            self,
            prompts=distinct,
            rows=np.append(self.rows, met),
            batches=np.append(self.batches, np.full(len(met), len(self.examples))),
            means=np.concatenate([self.means, losses.means[first].astype(np.float32)]),
            examples=np.concatenate([self.examples, losses.counts[None]]),
            trust=np.append(self.trust, 1.0),
            biases=np.pad(self.biases, (new, (0, 0))),
            shares=self.shares + np.stack([share, share**2]),
        )

    def of(self, prompts: NDArray[np.int64], looks: NDArray[np.int64]) -> Self:
        """Return some of the losses, of some prompts in a new order.

        Prompts and mini-batches without a loss among them are left out.

        Args:
            prompts: Rows of `prompts`.
            looks: Places in `rows`, rising, of these prompts.
        """
        prompts = prompts[np.isin(prompts, self.rows[looks])]
        place = np.zeros(len(self.prompts), dtype=np.int64)
        place[prompts] = np.arange(len(prompts))
        batches, renumbered = np.unique(self.batches[looks], return_inverse=True)
        return replace(
            self,
            prompts=self.prompts[prompts],
            rows=place[self.rows[looks]],
            batches=renumbered.astype(np.int64),
            means=self.means[looks],
            examples=self.examples[batches],
            trust=self.trust[batches],
            biases=self.biases[prompts],
        )

    def latest(self, size: int) -> Self:
        """Return the last mini-batches that together met at most `size` prompts."""
        if len(self.prompts) <= size:
            return self
        # The first time that a prompt is met, from the end.
        met = np.unique(self.rows[::-1], return_index=True)[1]
        known = np.cumsum(np.bincount(met, minlength=len(self.rows)))
        backwards = self.batches[::-1]
        inside = np.flatnonzero(known <= size)
        oldest = backwards[inside[-1]]
        # A mini-batch stays whole.
        if inside[-1] + 1 < len(backwards) and backwards[inside[-1] + 1] == oldest:
            oldest += 1
        looks = np.flatnonzero(self.batches >= min(oldest, self.batches[-1]))
        return self.of(np.unique(self.rows[looks]), looks)

    def remembering(self, prompts: NDArray[np.int64], size: int) -> Self:
        """Return some prompts in a new order, with their last `size` losses.

        Prompts that have none of these are forgotten.

        Args:
            prompts: Their rows.
            size: How many losses, at most.
        """
        looks = np.flatnonzero(np.isin(self.rows, prompts))[-size:]
        return self.of(prompts, looks)

    @property
    def num_told(self) -> int:
        """Mini-batches so far, those that are forgotten too."""
        return round(float(self.shares[0].sum()))  # the shares of each sum to 1

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which classes any client has shown, shape (C,)."""
        seen: NDArray[np.bool_] = self.shares[0] > 0.0
        return seen

    @cached_property
    def class_share(self) -> NDArray[np.float64]:
        """The part of all examples that each class has, shape (C,)."""
        equal = 1.0 / len(self.seen)
        batches = self.shares[0].sum()  # each has shares that sum to 1
        if not batches:
            return np.full(self.seen.shape, equal)
        mean, square = self.shares / batches
        # A few clients that are alike by chance do not show how clients differ, so the variance of
        # their mean is taken about equal shares.
        from_equal = square - 2.0 * equal * mean + equal**2
        varies = float((from_equal / batches + (square - mean**2) / _CLIENTS_AHEAD).max())
        believed = _SHARE_SPREAD**2 / (_SHARE_SPREAD**2 + varies)
        result: NDArray[np.float64] = equal + believed * (mean - equal)
        return result

    @cached_property
    def trusted_looks(self) -> NDArray[np.float64]:
        """Mini-batches, as trusted, in which each prompt met each class; shape (P, C)."""
        met = self.trust[:, None] * (self.examples > 0)
        looks = np.zeros((len(self.prompts), met.shape[1]))
        np.add.at(looks, self.rows, met[self.batches])
        return looks

    def last_met(self) -> NDArray[np.int64]:
        """The last mini-batch of each prompt, shape (P,)."""
        last = np.zeros(len(self.prompts), dtype=np.int64)
        last[self.rows] = self.batches  # rising, so that the last one stays
        return last

    def row(self, prompt: NDArray[np.int64] | None) -> int | None:
        """The row of a prompt; None where it was not met, or there is none."""
        if prompt is None:
            return None
        rows = np.flatnonzero((self.prompts == prompt).all(axis=1))
        return int(rows[0]) if len(rows) else None


def _all_there(numbers: NDArray[np.int64], count: int) -> bool:
    """Whether these are the numbers from 0 to below `count`, and none is missing."""
    if not numbers.size:
        return count == 0
    known = numbers.min() >= 0 and numbers.max() < count
    return bool(known and np.bincount(numbers, minlength=count).all())
