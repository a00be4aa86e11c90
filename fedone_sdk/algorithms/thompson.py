"""Thompson sampling: prompts made of the tokens that seem to help, and of those that may."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pool import Pool
from .search import PromptSearch

__all__ = ["ThompsonSampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThompsonSampling(PromptSearch):
    """A token is thought to add the same to a prompt's loss wherever it stands.

    For each class and bias, a prompt's own part of its loss is modelled as the sum of its tokens'
    effects, each normal around 0, by Bayesian linear regression over the pool. A new prompt draws
    the effects from their posterior (Thompson 1933; Russo et al. 2018), and takes tokens one by
    one, each the one that lowers the drawn loss at its best bias most, as far as one does. With a
    blank, which adds nothing, at most as many as a geometric number: mostly one or two.

    What is learnt of a token by one prompt serves all: 200 tokens are told apart sooner than the
    200^n prompts of them. The linear algebra may round otherwise on another processor.

    Attributes: see `PromptSearch`.
    """

    def _new(self, pool: Pool, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        means, roots = self._effects(pool)
        share, start = pool.class_share, pool.average
        prompts = np.empty((count, self.prompt_len), dtype=np.int64)
        for prompt, length in zip(prompts, self._lengths(count, rng), strict=True):
            # One draw for all biases: a token's effect moves, its dependence on the bias does not.
            drawn = np.einsum("cvw,cw->cv", roots, rng.normal(size=roots.shape[:2]))
            effects = (share[:, None, None] * (means + drawn[:, :, None])).sum(axis=0)
            prompt[:] = self._best_tokens(pool, start, effects, int(length))
        return self._compact(rng.permuted(prompts, axis=1))

    def _best_tokens(
        self, pool: Pool, start: NDArray[np.float64], effects: NDArray[np.float64], most: int
    ) -> list[int]:
        """At most `most` distinct tokens, greedily; all of them where there is no blank."""
        free = np.ones(self.vocab_size, dtype=bool)
        if self.blank is not None:
            free[self.blank] = False
        chosen: list[int] = []
        curve, lowest = start, float(pool.lowest(start[None])[0])
        while len(chosen) < most and free.any():
            values = np.where(free, pool.lowest(curve + effects), np.inf)
            token = int(values.argmin())
            if self.blank is not None and values[token] >= lowest:
                break
            chosen.append(token)
            free[token] = False
            curve, lowest = curve + effects[token], float(values[token])
        if self.blank is None:  # a vocabulary smaller than the prompt repeats itself
            return [chosen[place % len(chosen)] for place in range(self.prompt_len)]
        return chosen + [self.blank] * (self.prompt_len - len(chosen))

    def _effects(self, pool: Pool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means of the tokens' effects, (C, N, G), and roots of their covariances, (C, N, N)."""
        tokens = np.arange(self.vocab_size)
        occurrences = (pool.prompts[:, :, None] == tokens).sum(axis=1).astype(np.float64)
        if self.blank is not None:
            occurrences[:, self.blank] = 0.0
        length = max(1.0, float(occurrences.sum(axis=1).mean()))
        noise, signal = pool.variances()
        means, roots = [], []
        for c in range(len(noise)):
            behind = pool.count[:, c]
            weighted = occurrences * (behind / noise[c])[:, None]
            precision = occurrences.T @ weighted + np.eye(self.vocab_size) * (length / signal[c])
            means.append(np.linalg.solve(precision, weighted.T @ pool.own[:, c]))
            # With precision = L L', the rows of L^-1 transposed have the covariance's products.
            root = np.linalg.inv(np.linalg.cholesky(precision)).T
            if self.blank is not None:
                root[self.blank] = 0.0
            roots.append(root)
        return np.stack(means), np.stack(roots)
