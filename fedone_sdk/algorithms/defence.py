"""Defences against lying clients, for rounds of one client as well as of many.

With one client per round there is nobody to compare an update with, so it is compared with what
the run has seen from other clients before:

- its *size* with the sizes of the run's last updates;
- its *direction* with the effect that each token has had so far.

What is found bounds its step, or holds it back; what each client did is kept in a ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .state import Memory

__all__ = ["Admitted", "Contribution", "Defence", "Influence", "ledger"]

WINDOW = 64
"""How many of the last updates say what is usual: sizes and agreement change as a run learns."""

WARM_UP = 5
"""Updates before anything is an outlier."""

PRIOR = 2.0
"""A token's effect is shrunk as if so many more updates had found none."""

_MOST_VOTE = 3.0
"""No update moves a token's effect by more than this many times its own typical entry."""

_FEW = 3
"""A liar among fewer updates than this could set the measure of what is usual."""

_FIRST_STEP = 0.02
"""Until then, the longest step as a part of alpha's norm."""

_GROWTH = 2.0
"""A step counts in what is usual with at most so many times the length that was allowed."""

_SIZE_FLOOR = 0.25
"""Spreads that differ by a factor of e^0.25 differ by chance."""

_MAD_TO_STD = 1.4826
_MOST_SCORE = 10.0
_WINDOWS = ("steps", "sizes", "agreements", "losses")
_COLUMNS = _ROUNDS, _MOVEMENT, _SCALED, _OUTLIERS, _SCORES, _RESIDUALS = range(6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What one client's work would do.

    Attributes:
        client: Its enrolment index.
        alpha: Alpha after its local steps, float32, shape (n, N), feasible.
        mean_loss: Over its scored prompts, as it says.
        advantage: Per token how much worse than the others it looked, shape (n, N), 0 where no
            prompt drew it; None reads it from the step of alpha.
        spread: Standard deviation of the losses as they were sent; None takes the step's norm.
    """

    client: int
    alpha: NDArray[np.float32]
    mean_loss: float
    advantage: NDArray[np.float64] | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admitted:
    """What of a contribution counts.

    Attributes:
        client: Whose.
        alpha: Float32, shape (n, N): bit for bit the client's where `scale` is 1, and the round's
            where it is 0.
        scale: The part of the step that counts, from 0 to 1.
        outlier: Whether it was held back.
        agreement: Cosine with what other updates said of the same tokens; None while that is
            not known.
    """

    client: int
    alpha: NDArray[np.float32]
    scale: float
    outlier: bool
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """What one client has done to a run.

    Attributes:
        client: Its enrolment index.
        rounds: Its accepted updates.
        movement: The sum of its steps' L2 norms, as far as they counted.
        scaled: Steps that were scaled down.
        outliers: Updates that were held back.
        score: Its mean outlier score in robust standard deviations; negative disagrees.
        loss_residual: Mean difference of its mean losses from the run's median at that time.
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
    """Decides what of the clients' steps counts. Pure: what it remembers is passed in and out.

    Attributes:
        num_samples: I. A correlation over I prompts is off by about 1/sqrt(I - 1) by chance, and
            no honest client is an outlier for less.
        trust_region: The longest step, in medians of the run's last steps; None bounds none.
        outliers: Robust standard deviations (1.48 MAD) below the usual agreement, or above the
            usual spread, from which on an update is held back; None holds none back.
        quarantine: A client is quarantined when at least this many of its updates, and more than
            half of them, were outliers; None quarantines none.
        max_influence: The largest share of the run's movement that one client may have, once
            2 / `max_influence` updates are in; None is no limit.
    """

    num_samples: int
    trust_region: float | None = None
    outliers: float | None = None
    quarantine: int | None = None
    max_influence: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.integer("num_samples", self.num_samples, minimum=2)
        for name in ("trust_region", "outliers", "max_influence"):
            if getattr(self, name) is not None:
                _checks.number(name, getattr(self, name))
        if self.quarantine is not None:
            _checks.integer("quarantine", self.quarantine, minimum=1)
        if self.max_influence is not None and self.max_influence > 1.0:
            raise ValueError(f"max_influence must be at most 1, not {self.max_influence!r}")

    def admit(
        self, alpha: NDArray[np.float32], contributions: Sequence[Contribution], memory: Memory
    ) -> tuple[list[Admitted], Memory]:
        """Judge a round's contributions by what was known before it.

        Args:
            alpha: What the round started from, shape (n, N).
            contributions: By enrolment index and seat.
            memory: This class's own, empty at the start.

        Returns:
            One verdict per contribution, in order, and the next memory.
        """
        known = _Known(memory, alpha.shape)
        looks = [_Look.at(one, alpha, known) for one in contributions]
        # Two that came together cannot say which of them is too long; three can.
        usual = [*known.steps, *(look.norm for look in looks if len(looks) > 2 and look.norm)]
        verdicts = [self._judge(alpha, look, known, usual) for look in looks]
        for look, verdict in zip(looks, verdicts, strict=True):
            known.add(look, verdict)
        return [verdict.admitted for verdict in verdicts], known.memory()

    def quarantined(self, memory: Memory) -> frozenset[int]:
        """Return the clients whose updates shall not count any more."""
        if self.quarantine is None:
            return frozenset()
        return frozenset(
            one.client
            for one in ledger(memory)
            if one.outliers >= self.quarantine and 2 * one.outliers > one.rounds
        )

    def _judge(
        self, alpha: NDArray[np.float32], look: _Look, known: _Known, usual: Sequence[float]
    ) -> _Verdict:
        score = self._score(look, known)
        outlier = self.outliers is not None and score < -self.outliers
        first = _FIRST_STEP * float(np.linalg.norm(alpha))
        longest = self._longest(look.client, known, usual, first)
        scale = 0.0 if outlier else 1.0 if look.norm <= longest else longest / look.norm
        moved = look.alpha
        if scale < 1.0:
            moved = (alpha.astype(np.float64) + scale * look.step).astype(np.float32)
        admitted = Admitted(
            client=look.client,
            alpha=moved,
            scale=scale,
            outlier=outlier,
            agreement=look.agreement,
        )
        # A long step may say that steps grow, but by no more than this.
        measure = min(look.norm, _GROWTH * max(longest, first))
        return _Verdict(admitted=admitted, score=score, measure=measure)

    def _score(self, look: _Look, known: _Known) -> float:
        """The worse of the two comparisons, in robust standard deviations; negative is worse."""
        score = 0.0
        if look.agreement is not None and len(known.agreements) >= WARM_UP:
            chance = 1.0 / math.sqrt(self.num_samples - 1)
            score = _robust_score(look.agreement, known.agreements, chance)
        if look.size is not None and len(known.sizes) >= WARM_UP:
            # Only what is too large: losses that hardly differ move nothing.
            too_large = _robust_score(look.size, known.sizes, _SIZE_FLOOR)
            score = min(score, -too_large)
        return min(max(score, -_MOST_SCORE), _MOST_SCORE)

    def _longest(self, client: int, known: _Known, usual: Sequence[float], first: float) -> float:
        longest = math.inf
        if self.trust_region is not None:
            if usual:
                longest = self.trust_region * sorted(usual)[(len(usual) - 1) // 2]
            if len(usual) < _FEW:
                longest = min(longest, first)
        share = self.max_influence
        if share is not None and share < 1.0 and known.rounds * share >= 2.0:
            # own + x <= share (total + x)
            room = share * known.movement - known.entry(client)[_MOVEMENT]
            longest = min(longest, max(room, 0.0) / (1.0 - share))
        return longest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """A contribution with what can be read from it."""

    client: int
    alpha: NDArray[np.float32]
    step: NDArray[np.float64]
    norm: float
    evidence: NDArray[np.float64]
    size: float | None
    agreement: float | None
    mean_loss: float

    @classmethod
    def at(cls, one: Contribution, alpha: NDArray[np.float32], known: _Known) -> _Look:
        start = alpha.astype(np.float64)
        step = one.alpha.astype(np.float64) - start
        norm = float(np.linalg.norm(step))
        evidence = -step if one.advantage is None else one.advantage
        spread = norm if one.spread is None else one.spread
        return cls(
            client=one.client,
            alpha=one.alpha,
            step=step,
            norm=norm,
            evidence=evidence,
            size=math.log(spread) if spread else None,
            agreement=known.agreement(evidence),
            mean_loss=one.mean_loss,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Verdict:
    """What becomes of a contribution, and the length that it counts with in what is usual."""

    admitted: Admitted
    score: float
    measure: float


class _Known:
    """What a run has seen: arrays in and out, plain numbers between."""

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
        self.rounds = sum(entry[_ROUNDS] for entry in self.entries.values())
        self.movement = math.fsum(entry[_MOVEMENT] for entry in self.entries.values())

    def memory(self) -> Memory:
        clients = sorted(self.entries)
        entries = [self.entries[client] for client in clients]
        windows = (self.steps, self.sizes, self.agreements, self.losses)
        return {
            "votes": self.votes,
            "seen": self.seen,
            **{
                name: np.array(values[-WINDOW:])
                for name, values in zip(_WINDOWS, windows, strict=True)
            },
            "clients": np.array(clients, dtype=np.int64),
            "ledger": np.array(entries).reshape(-1, len(_COLUMNS)),
        }

    def entry(self, client: int) -> list[float]:
        return self.entries.get(client, [0.0] * len(_COLUMNS))

    def agreement(self, evidence: NDArray[np.float64]) -> float | None:
        """Cosine of an update's evidence with the effects known of the same tokens."""
        effects = np.where(evidence != 0.0, self.votes / (self.seen + PRIOR), 0.0)
        length = float(np.linalg.norm(effects) * np.linalg.norm(evidence))
        return None if length < 1e-30 else float((effects * evidence).sum() / length)

    def add(self, look: _Look, verdict: _Verdict) -> None:
        admitted = verdict.admitted
        touched = look.evidence != 0.0
        if touched.any():
            # Each update has one vote, however loud it is.
            typical = math.sqrt(float((look.evidence[touched] ** 2).mean()))
            if typical > 0.0:
                self.votes += np.clip(look.evidence / typical, -_MOST_VOTE, _MOST_VOTE)
                self.seen += touched
        residual = look.mean_loss - _median([*self.losses, look.mean_loss])
        scaled = admitted.scale < 1.0 and not admitted.outlier
        changes = (1, admitted.scale * look.norm, scaled, admitted.outlier, verdict.score, residual)
        self.entries[look.client] = [
            float(old + new) for old, new in zip(self.entry(look.client), changes, strict=True)
        ]
        self.losses.append(look.mean_loss)
        # What moves nothing says nothing of how far others may go: once most prompts of a step
        # are the same, the usual step would be none.
        if look.norm:
            self.steps.append(verdict.measure)
        if look.size is not None:
            self.sizes.append(look.size)
        if look.agreement is not None:
            self.agreements.append(look.agreement)


def ledger(memory: Memory) -> list[Influence]:
    """Return what each client has done, by enrolment index."""
    return [
        Influence(
            client=int(client),
            rounds=int(entry[_ROUNDS]),
            movement=float(entry[_MOVEMENT]),
            scaled=int(entry[_SCALED]),
            outliers=int(entry[_OUTLIERS]),
            score=float(entry[_SCORES] / entry[_ROUNDS]),
            loss_residual=float(entry[_RESIDUALS] / entry[_ROUNDS]),
        )
        for client, entry in zip(memory.get("clients", ()), memory.get("ledger", ()), strict=True)
    ]


def _robust_score(value: float, usual: Sequence[float], floor: float) -> float:
    middle = _median(usual)
    spread = _MAD_TO_STD * _median([abs(one - middle) for one in usual])
    return (value - middle) / max(spread, floor)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
