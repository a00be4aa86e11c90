"""Defences against Byzantine clients, which send false updates.

Prompts are drawn from alpha, the weights of N tokens (candidates) at n positions. An update changes
alpha by a *step*. A round may have only one client, so an update is compared with earlier updates:

- Its *size* is the spread of its losses. It is compared with the sizes of recent updates.
- Its *agreement* is the cosine between the effects of its tokens and their mean effects so far.

The step is applied, shortened or rejected, and the result is recorded per client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .method_state import Floats, Memory

WINDOW = 64
"""Number of recent updates that define the typical size and agreement of an update."""

WARM_UP = 5
"""Number of updates before an update can be an outlier."""

PRIOR = 2.0
"""A token's mean effect is computed as if this many more updates had shown no effect."""

_MOST_VOTE = 3.0
"""A token's effect is clipped to this multiple of the root mean square effect in its update."""

_FEW = 3
"""With fewer steps, their median may come from a false update, so a fixed bound applies too."""

_FIRST_STEP, _FIRST_BOUND = 0.02, 0.3
"""Fixed bounds of the first steps, as fractions of alpha's norm: without and with `only_bounds`."""

_GROWTH = 2.0
"""Upper bound of a recorded step length, as a multiple of the allowed length."""

_SIZE_FLOOR = 0.25
"""Lower bound of the robust standard deviation of the sizes' logarithms."""

_MAD_TO_STD = 1.4826
_MOST_SCORE = 10.0
_WINDOWS = ("steps", "sizes", "agreements", "losses")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """The result of one client's work.

    Attributes:
        alpha: Alpha after the client's work, float32, shape (n, N), feasible.
        advantage: By how much the losses of prompts with a token exceed the average, shape (n, N),
            0 for tokens that no prompt has. If None, the step of alpha is used instead.
        spread: Standard deviation of the losses. If None, the norm of the step is used instead.
    """

    client: int
    alpha: NDArray[np.float32]
    mean_loss: float
    advantage: Floats | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admitted:
    """The part of a contribution that is applied.

    Attributes:
        alpha: Float32, shape (n, N). If `scale` is 1, it is bit for bit the client's alpha; if
            `scale` is 0, it is the round's initial alpha.
        scale: The applied fraction of the step, from 0 to 1.
        agreement: Cosine between the update and the known effects of its tokens; None if unknown.
    """

    client: int
    alpha: NDArray[np.float32]
    scale: float
    outlier: bool
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The accumulated influence of one client on a run.

    Attributes:
        rounds: Number of the client's updates that were judged.
        movement: The sum of the L2 norms of the client's applied steps.
        scaled: Number of the client's updates whose step was shortened.
        score: Mean score of the client's updates, in robust standard deviations. A negative score
            means that an update disagrees with earlier updates or is too large.
        loss_residual: Mean, over the client's updates, of the loss minus the run's median so far.
    """

    client: int
    rounds: int
    movement: float
    scaled: int
    outliers: int
    score: float
    loss_residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Defence:
    """Limits or rejects the clients' steps. `admit` takes the memory and returns the next one.

    Attributes:
        num_samples: I, the number of prompts per update. The sampling error of an agreement is
            about 1/sqrt(I - 1), so the agreements' standard deviation is taken as at least this.
        trust_region: The longest step, as a multiple of the median recent step; None is no limit.
        outliers: How far an agreement may be below the median, and a size above it, in robust
            standard deviations (1.48 MAD). Other updates are rejected. None is no limit.
        quarantine: A client is quarantined when at least this many of its updates, and more than
            half of them, were outliers; None quarantines no client.
        only_bounds: Whether steps are only shortened, and nothing is recorded about clients.
    """

    num_samples: int
    trust_region: float | None = None
    outliers: float | None = None
    quarantine: int | None = None
    only_bounds: bool = False

    def __post_init__(self) -> None:
        _checks.integer("num_samples", self.num_samples, minimum=2)
        if self.trust_region is not None:
            _checks.number("trust_region", self.trust_region)
        if self.outliers is not None:
            _checks.number("outliers", self.outliers)
        if self.quarantine is not None:
            _checks.integer("quarantine", self.quarantine, minimum=1)

    def admit(
        self, alpha: NDArray[np.float32], contributions: Sequence[Contribution], memory: Memory
    ) -> tuple[list[Admitted], Memory]:
        """Judge a round's contributions by the updates of earlier rounds.

        Args:
            alpha: The round's initial alpha, shape (n, N).
            contributions: Ordered by the clients' enrolment indices.
            memory: As returned for the previous round; empty at the start.

        Returns:
            The admitted contributions, in order, and the next memory.
        """
        history = _History(memory, (0, 0) if self.only_bounds else alpha.shape)
        updates = [_Update.of(each, alpha, history) for each in contributions]
        usual = list(history.steps)
        if len(updates) > 2:  # One long step is not their median, so the round's steps count too.
            usual += [update.norm for update in updates if update.norm]
        scores = [self._score(update, history) for update in updates]
        # The recorded length is bounded, so that one long step does not raise the typical length.
        longest, bound = self._longest(alpha, usual)
        admitted = [
            self._admitted(alpha, update, score, longest)
            for update, score in zip(updates, scores, strict=True)
        ]
        for update, score, part in zip(updates, scores, admitted, strict=True):
            history.add(update, part, score, min(update.norm, bound))
        return admitted, history.memory()

    def quarantined(self, memory: Memory) -> frozenset[int]:
        """Return the quarantined clients, whose updates no longer count."""
        if self.quarantine is None:
            return frozenset()
        return frozenset(
            influence.client
            for influence in ledger(memory)
            if influence.outliers >= self.quarantine and 2 * influence.outliers > influence.rounds
        )

    def _longest(self, alpha: NDArray[np.float32], usual: Sequence[float]) -> tuple[float, float]:
        """Return the longest step that is allowed, and the longest that is recorded."""
        share = _FIRST_BOUND if self.only_bounds else _FIRST_STEP
        first = share * float(np.linalg.norm(alpha))
        longest = math.inf
        if self.trust_region is not None:
            if usual:
                longest = self.trust_region * sorted(usual)[(len(usual) - 1) // 2]
            if len(usual) < _FEW:
                longest = min(longest, first)
        return longest, _GROWTH * max(longest, first)

    def _admitted(
        self, alpha: NDArray[np.float32], update: _Update, score: float, longest: float
    ) -> Admitted:
        outlier = self.outliers is not None and score < -self.outliers
        scale = 0.0 if outlier else 1.0 if update.norm <= longest else longest / update.norm
        moved = update.source.alpha
        if scale < 1.0:
            moved = (alpha.astype(np.float64) + scale * update.step).astype(np.float32)
        return Admitted(
            client=update.source.client,
            alpha=moved,
            scale=scale,
            outlier=outlier,
            agreement=update.agreement,
        )

    def _score(self, update: _Update, history: _History) -> float:
        """Return the lower of the scores of agreement and size, in robust standard deviations."""
        score = 0.0
        if update.agreement is not None and len(history.agreements) >= WARM_UP:
            chance = 1.0 / math.sqrt(self.num_samples - 1)
            score = _robust_score(update.agreement, history.agreements, chance)
        if update.size is not None and len(history.sizes) >= WARM_UP:
            # Only large spreads are outliers: losses with a small spread hardly move alpha.
            too_large = _robust_score(update.size, history.sizes, _SIZE_FLOOR)
            score = min(score, -too_large)
        return min(max(score, -_MOST_SCORE), _MOST_SCORE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Update:
    """A contribution with its measurements; `evidence` has the effect of each token."""

    source: Contribution
    step: Floats
    norm: float
    evidence: Floats
    size: float | None
    agreement: float | None

    @classmethod
    def of(
        cls, contribution: Contribution, alpha: NDArray[np.float32], history: _History
    ) -> _Update:
        start = alpha.astype(np.float64)
        step = contribution.alpha.astype(np.float64) - start
        norm = float(np.linalg.norm(step))
        evidence = -step if contribution.advantage is None else contribution.advantage
        spread = norm if contribution.spread is None else contribution.spread
        return cls(
            source=contribution,
            step=step,
            norm=norm,
            evidence=evidence,
            size=math.log(spread) if spread else None,
            agreement=history.agreement(evidence),
        )


class _History:
    """The memory of a `Defence`, with lists of numbers in place of most arrays."""

    def __init__(self, memory: Memory, shape: tuple[int, ...]) -> None:
        self.votes = np.array(memory.get("votes", np.zeros(shape)))
        self.seen = np.array(memory.get("seen", np.zeros(shape)))
        self.steps, self.sizes, self.agreements, self.losses = (
            memory.get(name, np.empty(0)).tolist() for name in _WINDOWS
        )
        clients, entries = memory.get("clients", ()), memory.get("ledger", ())
        self.entries = {
            int(client): [float(number) for number in entry]
            for client, entry in zip(clients, entries, strict=True)
        }

    def memory(self) -> Memory:
        clients = sorted(self.entries)
        entries = [self.entries[client] for client in clients]
        memory = {
            "votes": self.votes,
            "seen": self.seen,
            **{name: np.array(getattr(self, name)[-WINDOW:]) for name in _WINDOWS},
            "clients": np.array(clients, dtype=np.int64),
            "ledger": np.array(entries),
        }
        return {name: array for name, array in memory.items() if array.size}

    def agreement(self, evidence: Floats) -> float | None:
        """Return the cosine of an update's evidence with the known effects of the same tokens."""
        if not self.votes.size:
            return None
        effects = np.where(evidence != 0.0, self.votes / (self.seen + PRIOR), 0.0)
        length = float(np.linalg.norm(effects) * np.linalg.norm(evidence))
        return None if length < 1e-30 else float((effects * evidence).sum() / length)

    def add(self, update: _Update, admitted: Admitted, score: float, length: float) -> None:
        # Zero steps are left out: a nearly converged run has so many that the median would be 0.
        if update.norm:
            self.steps.append(length)
        if not self.votes.size:
            return
        touched = update.evidence != 0.0
        if touched.any():
            # Updates are normalised, so that they count equally whatever their scale.
            typical = math.sqrt(float((update.evidence[touched] ** 2).mean()))
            if typical > 0.0:
                self.votes += np.clip(update.evidence / typical, -_MOST_VOTE, _MOST_VOTE)
                self.seen += touched
        client, loss = update.source.client, update.source.mean_loss
        residual = loss - _median([*self.losses, loss])
        scaled = admitted.scale < 1.0 and not admitted.outlier
        moved = admitted.scale * update.norm
        changes = (1, moved, scaled, admitted.outlier, score, residual)
        entry = self.entries.get(client, [0.0] * len(changes))
        self.entries[client] = [float(old + new) for old, new in zip(entry, changes, strict=True)]
        self.losses.append(loss)
        if update.size is not None:
            self.sizes.append(update.size)
        if update.agreement is not None:
            self.agreements.append(update.agreement)


def ledger(memory: Memory) -> list[Influence]:
    """Return the influence of each client, ordered by enrolment index."""
    return [
        Influence(
            client=int(client),
            rounds=int(rounds),
            movement=float(movement),
            scaled=int(scaled),
            outliers=int(outliers),
            score=float(scores / rounds),
            loss_residual=float(residuals / rounds),
        )
        for client, (rounds, movement, scaled, outliers, scores, residuals) in zip(
            memory.get("clients", ()), memory.get("ledger", ()), strict=True
        )
    ]


def _robust_score(value: float, usual: Sequence[float], floor: float) -> float:
    middle = _median(usual)
    spread = _MAD_TO_STD * _median([abs(each - middle) for each in usual])
    return (value - middle) / max(spread, floor)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
