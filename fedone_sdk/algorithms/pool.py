"""A pool of prompts whose losses came from different mini-batches, ranked as if from one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .state import Memory

__all__ = ["Pool"]

# A prompt's mean is shrunk as if it had tied with the average random prompt this many times
# more: one lucky mini-batch does not make a leader.
PRIOR_COUNT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Distinct prompts, best first.

    Attributes:
        prompts: Shape (P, n), int64.
        total: The sum of each prompt's losses, batch effects removed; shape (P,), float64.
        count: How many losses that is; shape (P,), int64.
    """

    prompts: NDArray[np.int64]
    total: NDArray[np.float64]
    count: NDArray[np.int64]

    @classmethod
    def remembered(cls, memory: Memory, prompt_len: int) -> Pool:
        """Return the pool that `memory` holds; an empty memory holds an empty pool."""
        if not memory:
            prompts = np.empty((0, prompt_len), dtype=np.int64)
            return cls(prompts=prompts, total=np.empty(0), count=np.empty(0, dtype=np.int64))
        if set(memory) != {"prompts", "total", "count"}:
            raise ValueError("not the memory of a pool: it holds prompts, total and count")
        pool = cls(**memory)
        size = len(pool.prompts)
        if (
            pool.prompts.shape != (size, prompt_len)
            or pool.total.shape != (size,)
            or pool.count.shape != (size,)
        ):
            raise ValueError(f"the pool's arrays do not fit prompts of {prompt_len} tokens")
        if size and pool.count.min() < 1:
            raise ValueError("every prompt of a pool was scored at least once")
        return pool

    def memory(self) -> Memory:
        """Return the pool as a state's memory."""
        return {"prompts": self.prompts, "total": self.total, "count": self.count}

    def worth_another_look(self, count: int) -> NDArray[np.int64]:
        """Return rows: half the leaders, half challengers by their plain mean.

        Leaders alone would never be overtaken: a newcomer's shrunken mean starts low.
        """
        leaders = (count + 1) // 2
        plain_mean = self.total[leaders:] / self.count[leaders:]
        challengers = leaders + np.argsort(plain_mean, kind="stable")[: count - leaders]
        return np.concatenate([np.arange(min(leaders, len(self.prompts))), challengers])

    def with_batch(self, prompts: NDArray[np.int64], losses: NDArray[np.float64]) -> Pool:
        """Return the pool with one mini-batch's losses added.

        In the model loss = prompt + batch + noise, the prompts known before measure the batch's
        effect: the mean of loss minus shrunken mean, each weighted by the inverse variance
        1 / (1 + 1/count) of that difference. Without one (the first batch), its mean is the zero.

        Args:
            prompts: Shape (I, n); equal ones share a row.
            losses: Shape (I,).
        """
        row_of = {prompt.tobytes(): row for row, prompt in enumerate(self.prompts)}
        rows = [row_of.setdefault(prompt.tobytes(), len(row_of)) for prompt in prompts]
        new = len(row_of) - len(self.prompts)
        distinct = np.pad(self.prompts, ((0, new), (0, 0)))
        distinct[rows] = prompts
        total, count = np.pad(self.total, (0, new)), np.pad(self.count, (0, new))

        weight = count[rows] / (count[rows] + 1.0)
        surprise = losses - (total / (count + PRIOR_COUNT))[rows]
        known = np.sum(weight)
        effect = np.sum(weight * surprise) / known if known else np.mean(losses)
        np.add.at(total, rows, losses - effect)
        np.add.at(count, rows, 1)
        return Pool(prompts=distinct, total=total, count=count)

    def best(self, size: int) -> Pool:
        """Return the `size` best prompts by shrunken mean, best first; ties keep their order."""
        shrunken_mean = self.total / (self.count + PRIOR_COUNT)
        order = np.argsort(shrunken_mean, kind="stable")[:size]
        return Pool(prompts=self.prompts[order], total=self.total[order], count=self.count[order])
