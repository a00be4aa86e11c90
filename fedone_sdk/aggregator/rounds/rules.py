"""What is fixed for a run, and what follows from it for a state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk.aggregator.rounds.curves import Curves, best_losses, told
from fedone_sdk.aggregator.rounds.defence import defence_of
from fedone_sdk.aggregator.rounds.privacy import Releases
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import (
    Algorithm,
    Candidates,
    ClassLosses,
    ServerOptimizer,
    State,
    method_from_spec,
    stream,
    stream_seed,
)
from fedone_sdk.algorithms.cma_es import check_library
from fedone_sdk.algorithms.space import Space
from fedone_sdk.algorithms.start import Start
from fedone_sdk.algorithms.trained import Trained
from fedone_sdk.budget import Account, Budget, Usage
from fedone_sdk.calibration import bias_grid
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    MAX_ELEMENTS,
    AlphaAssignment,
    LossesAssignment,
    MetricReport,
    Step,
)
from fedone_sdk.messages.ndarray import memory_to_wire, prompts_to_wire, to_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Bias
from fedone_sdk.vocabulary import Layout, Vocabulary

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "Rules", "working"]

MIN_SAMPLES = 2
"""The variance-reduced estimator divides by I - 1."""

ONE_QUERY = Usage(queries=1)
"""The most that one query may spend where nothing but queries can be bounded."""

_STRIDE = 1 << 32
"""Sets the draws after a rollback apart: more slots and local steps than a run may have."""


_MANY = 1 << 16
"""Numbers of an alpha that is checked, projected and written within some milliseconds."""


class Rules:
    """A run's description, ready to decide with.

    Args:
        run_id: Names the run in its messages.
        spec: The run.
        vocab_size: N, with the candidates that may come in later.
        blank: Index of the blank candidate, if all positions share one.
        layout: The slots of the prompt (`Vocabulary.layout`); empty where positions are all alike.
        start: What the search begins with, in the vocabulary's indices (`PromptSpec.begun`).
        planned: The queries that the method plans with; None are those of the description.
        worst_query: The most that one query may spend.
        gateway_model: Fingerprint of the gateway's model, empty while that is not known; None when
            clients score themselves.

    Raises:
        MissingExtraError: The method or the privacy needs a library that is not installed.
        ValueError: Its messages would be too large, or the method cannot work with it.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        *,
        vocab_size: int,
        blank: int | None = None,
        layout: Layout = (),
        start: Start | None = None,
        planned: int | None = None,
        worst_query: Usage = ONE_QUERY,
        gateway_model: str | None = None,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.layout = layout
        self._blank = blank
        self._start = start
        self._planned = planned
        self._grown: tuple[tuple[str, str], ...] = ()
        self._base: Any = self  # A type checker takes no Self here.
        self._later: dict[tuple[int, int | None], Self] = {}
        self.vocab_size = vocab_size
        self.worst_query = worst_query
        self.gateway_model = gateway_model
        self.shape = spec.method.shape(spec.prompt.length, vocab_size)
        self.losses_exchange = spec.participation.exchange == "losses"
        # The label biases that clients report their losses at; None where they report none.
        self.biases = (
            bias_grid(len(spec.task.labels)) if spec.calibration.kind == "labels" else None
        )
        sizes = {
            "alpha": math.prod(self.shape),
            "an assignment": spec.method.num_samples * spec.method.prompt_width(spec.prompt.length),
            "an answer of the gateway": spec.method.num_samples
            * spec.method.batch_size
            * max(len(spec.task.labels), 1),
        }
        points = 1 if self.biases is None else len(self.biases) * len(spec.task.labels)
        if self.losses_exchange:
            sizes["an update"] = spec.method.num_samples * points
        else:
            memory = spec.method.travelling_memory(spec.prompt.length, points)
            sizes["the method's memory"] = memory
        for what, size in sizes.items():
            if size > MAX_ELEMENTS:
                raise ValueError(f"{what} would hold {size} numbers, a message {MAX_ELEMENTS}")
        self.method = method_from_spec(
            spec.method,
            prompt_len=spec.prompt.length,
            vocab_size=vocab_size,
            blank=blank,
            space=Space.of(layout, vocab_size) if layout else None,
            seed=spec.seed,
            biases=self.biases,
            asks=self.planned_asks if self.losses_exchange else None,
            start=start,
        )
        # A seat's prompts are drawn for its assignment, for the gateway, and for what is learnt.
        self._drawn: dict[tuple[int, ...], tuple[State, Candidates]] = {}
        if self.losses_exchange and spec.method.domain == "latent":
            check_library()  # not at the first client's expense
        self.defence = defence_of(spec, self.method)
        self.releases = Releases.of(spec)
        noised = spec.privacy is not None and spec.privacy.target == "losses"
        # Devices have clipped what they add noise to; to clip the noise would bend the mean.
        self.loss_clip = None if noised else spec.defence.loss_clip
        self.server_optimizer = ServerOptimizer(
            name=spec.participation.server_optimizer,
            learning_rate=spec.participation.server_learning_rate,
        )

    @classmethod
    def of(cls, run_id: str, spec: RunSpec, vocabulary: Vocabulary, **options: Any) -> Self:
        """The rules of a run over these candidates; `options` as for the class itself."""
        return cls(
            run_id,
            spec,
            vocab_size=spec.prompt.capacity(vocabulary),
            blank=vocabulary.blank,
            layout=vocabulary.layout(spec.prompt.length) if vocabulary.slots else (),
            start=spec.prompt.warm_start(vocabulary),
            **options,
        )

    def at(self, state: RunState) -> Self:
        """The rules with the candidates and the plan that a state has."""
        if state.proposed == self._grown and state.planned == self._planned:
            return self
        if self is not self._base:
            base: Self = self._base
            return base.at(state)
        key = len(state.proposed), state.planned
        known = self._later.get(key)
        if known is None or known._grown != state.proposed:
            counts = Counter(slot for slot, _ in state.proposed)
            names = [slot.name for slot in self.spec.prompt.slots]
            layout = tuple(
                (repeat, size + counts[name], blank)
                for name, (repeat, size, blank) in zip(names, self.layout, strict=True)
            )
            known = type(self)(
                self.run_id,
                self.spec,
                vocab_size=self.vocab_size,
                # With new candidates the layout says which one is blank.
                blank=None if state.proposed else self._blank,
                layout=layout,
                start=self._start,
                planned=state.planned,
            )
            known._base, known._grown = self, state.proposed
            self._later[key] = known
        known.worst_query, known.gateway_model = self.worst_query, self.gateway_model
        found: Self = known
        return found

    def admitted(self, method: State) -> State:
        """A method's state with weights for candidates that are new since it was made."""
        space = getattr(self.method, "space", None)
        if not isinstance(space, Space):
            return method
        return method.evolve(alpha=self.method.project(space.admitted(method.alpha)))

    @property
    def algorithm(self) -> Algorithm:
        """The black-box method.

        Raises:
            ValueError: The clients train; nothing is asked.
        """
        if isinstance(self.method, Trained):
            raise ValueError(f"{self.spec.method.name} has no prompts to score")
        return self.method

    @property
    def remembers_clients(self) -> bool:
        """Whether clients' method memory is kept here between their rounds."""
        return self.losses_exchange and self.spec.method.remembers

    @property
    def repeats_exactly(self) -> bool:
        """Whether the log gives the same numbers on every machine.

        Where the server does linear algebra it does not: what CMA-ES and searches over whole
        prompts find depends on the processor and on the number of threads.
        """
        algebra = self.spec.method.domain == "latent" or self.spec.method.pools
        return not (self.losses_exchange and algebra)

    @property
    def slow(self) -> bool:
        """Whether asks, tells or projections may take more than some milliseconds.

        Searches over whole prompts and CMA-ES take tenths of a second; all others do where alpha is
        large.
        """
        algebra = self.spec.method.domain == "latent" or self.spec.method.pools
        if self.losses_exchange and algebra:
            return True
        return math.prod(self.shape) > _MANY

    @property
    def planned_asks(self) -> int:
        """The local steps that the run's rounds and its cap on queries leave room for."""
        return self.planned_queries // self.spec.method.num_samples

    @property
    def planned_queries(self) -> int:
        """The queries that the method plans with: its cap may be higher by now."""
        return self.planned_under(self.spec.budget) if self._planned is None else self._planned

    def planned_under(self, budget: Budget | None) -> int:
        """The queries that the run's rounds and a cap leave to training."""
        spec = self.spec
        per_round = spec.participation.clients_per_round * spec.method.local_steps
        planned = spec.rounds * per_round * spec.method.num_samples
        cap = None if budget is None else budget.queries
        return planned if cap is None else min(planned, cap)

    def more_asks(self, budget: Budget | None) -> bool:
        """Whether a cap leaves room for more asks than the method plans with."""
        return self.planned_under(budget) // self.spec.method.num_samples > self.planned_asks

    def replanned(self, state: RunState) -> RunState:
        """The state with a plan for the caps that there are now.

        A plan changes what is drawn, so it changes before any work of a round is given out.
        """
        begun = any(seat.phase != "offered" or seat.step for seat in state.seats)
        if begun or not (self.losses_exchange and self.spec.method.pools):
            return state
        cap = state.account.cap
        return self.with_plan(state, self.planned_under(cap)) if self.more_asks(cap) else state

    def with_plan(self, state: RunState, planned: int | None) -> RunState:
        """The state with another plan; a race that the old plan has begun is called off."""
        if planned == state.planned:
            return state
        return replace(state, planned=planned, method=self.method.search_on(state.method))

    @property
    def min_clients(self) -> int:
        """Clients that must be there before the first round starts."""
        wanted = self.spec.participation.min_clients
        if wanted is not None:
            return wanted
        if self.spec.data is not None:
            return self.spec.data.num_clients
        uniform = self.spec.participation.selection == "uniform"
        return self.spec.participation.clients_per_round if uniform else 1

    @property
    def given_model(self) -> str | None:
        """Fingerprint of the model that must score; None where devices decide.

        Empty while the gateway's model was not looked at.
        """
        pinned = self.spec.participation.model
        return pinned if self.gateway_model is None else self.gateway_model

    def start(self) -> RunState:
        """The state of a run that has not begun."""
        evaluation_cap = self.spec.evaluation.queries
        return RunState(
            method=self.method.init(),
            account=Account(cap=self.spec.budget),
            evaluation=Account(
                cap=None if evaluation_cap is None else Budget(queries=evaluation_cap)
            ),
            model=self.given_model or None,
            metric=MetricReport(name=self.spec.task.metric),
        )

    def vacancies(self, state: RunState) -> int:
        """How many of the round's seats nobody has."""
        if not state.running:
            return 0
        taken = {seat.slot for seat in state.seats}
        return self.spec.participation.clients_per_round - len(taken)

    def starved(self, state: RunState) -> bool:
        """Whether no more work can be paid for, and no open lease could change that."""
        return not state.account.leases and self.affordable_work(state) is None

    def weight(self, num_examples: int) -> int:
        """What a client counts that says it holds so many examples."""
        most = self.spec.participation.max_weight
        return num_examples if most is None else min(num_examples, most)

    def affordable_work(
        self, state: RunState, local: State | None = None
    ) -> tuple[int, int] | None:
        """The prompts and local steps that fit under the caps; fewer near the end, then None.

        Args:
            state: The run.
            local: The method state of the client whose work it is; None is the run's.
        """
        steps = 1 if self.losses_exchange else self.spec.method.local_steps
        if isinstance(self.method, Trained):
            return 0, steps  # Whoever has the model's weights asks nothing.
        most = self.spec.method.num_samples
        if self.losses_exchange:
            most = min(most, max(self.method.wanted(local or state.method), MIN_SAMPLES))
        for count in range(steps, 0, -1):
            samples = state.account.affordable(self.worst_query * count, most)
            if samples >= MIN_SAMPLES:
                return samples, count
        return None

    # Draws: from seeds, never stored

    def seed(self, state: RunState, seat: Seat, purpose: str, step: int) -> int:
        """The seed of what a seat draws in a local step."""
        # With replacement a client may hold two seats of a round: the slot keeps them apart.
        position = seat.slot * self.spec.method.local_steps + step
        return self._seed(state, purpose, seat.client, position)

    def selection_seed(self, state: RunState) -> int:
        """The seed of the next draw of clients."""
        return self._seed(state, "selection", 0, state.fills)

    def _seed(self, state: RunState, purpose: str, client: int, position: int) -> int:
        # What was rolled back shall not come again, with the same client and the same prompts.
        step = position + state.rollbacks * _STRIDE
        return stream_seed(self.spec.seed, purpose, state.round, client, step)

    def candidates(self, state: RunState, seat: Seat) -> Candidates:
        """The prompts of a seat's current step."""
        base = seat.local or state.method
        key = (seat.client, seat.slot, seat.step, seat.num_samples, state.round, state.rollbacks)
        known = self._drawn.get(key)
        if known is not None and known[0] is base:
            return known[1]
        rng = stream(self.seed(state, seat, "prompts", seat.step))
        drawn = self.algorithm.ask(base, rng, seat.num_samples)
        if len(self._drawn) >= 2 * self.spec.participation.clients_per_round:
            self._drawn.clear()
        self._drawn[key] = (base, drawn)
        return drawn

    def learned(
        self, state: RunState, seat: Seat, losses: Sequence[float], curves: Curves | None = None
    ) -> State:
        """What a seat's client knows once its current step gave `losses` (losses exchange).

        Args:
            state: The run.
            seat: The seat.
            losses: One per prompt.
            curves: The same by class and label bias, where the run calibrates by labels.
        """
        base = seat.local or state.method
        candidates = self.candidates(state, seat)
        return self.algorithm.tell(base, candidates, self.told(losses, curves))

    def told(
        self, losses: Sequence[float], curves: Curves | None
    ) -> NDArray[np.float64] | ClassLosses:
        """Losses as the method is told them (losses exchange)."""
        return self.clipped(losses) if curves is None else told(curves, self.loss_clip)

    def compared(self, seat: Seat) -> list[NDArray[np.float64]]:
        """What a finished seat's prompts are compared by, step by step, not clipped."""
        if seat.curves:
            return [best_losses(curves) for curves in seat.curves]
        return [np.array(losses, dtype=np.float64) for losses in seat.losses]

    def clipped(self, losses: ArrayLike) -> NDArray[np.float64]:
        """Losses as far as they count (losses exchange)."""
        given = np.array(losses, dtype=np.float64)
        return given if self.loss_clip is None else np.clip(given, 0.0, self.loss_clip)

    def measured(self, state: RunState) -> NDArray[Any]:
        """The prompt whose metric is a point of the curve, as `Method.prompt` gives it."""
        if self.spec.evaluation.prompt == "mode":
            return self.method.prompt(state.method)
        rng = stream(self._seed(state, "evaluation", 0, 0))
        drawn: NDArray[np.int64] = self.algorithm.ask(state.method, rng, 1).prompts[0]
        return drawn

    def bias(self, state: RunState) -> Bias | None:
        """The label bias that belongs to the deployable prompt, as far as the method finds one."""
        found = self.method.bias(state.method)
        return None if found is None else tuple(found.tolist())

    def plain_bias(self, state: RunState) -> Bias | None:
        """The label bias that belongs to no prompt, as far as the run paid for its losses."""
        found = self.method.plain_bias(state.method)
        return None if found is None else tuple(found.tolist())

    # Messages

    def assignment(
        self, state: RunState, seat: Seat, now: float
    ) -> AlphaAssignment | LossesAssignment:
        """What a working seat's client is sent."""
        common: dict[str, Any] = {
            "assignment_id": seat.assignment_id,
            "run_id": self.run_id,
            "round": state.round,
            "deadline_s": round(max(seat.due - now, 0.001), 3),
            "leased_queries": seat.num_samples * seat.num_steps,
            "vocabulary_version": len(state.proposed),
        }
        if self.losses_exchange:
            return LossesAssignment(
                **common,
                prompts=prompts_to_wire(self.candidates(state, seat).prompts, self.vocab_size),
                minibatch_seed=self.seed(state, seat, "minibatch", seat.step),
            )
        return AlphaAssignment(
            **common,
            alpha=to_wire(state.method.alpha),
            memory=memory_to_wire(state.method.memory),
            steps=tuple(
                Step(
                    num_samples=seat.num_samples,
                    minibatch_seed=self.seed(state, seat, "minibatch", step),
                    prompt_seed=self.seed(state, seat, "prompts", step),
                )
                for step in range(seat.num_steps)
            ),
        )


def working(state: RunState, assignment_id: str) -> Seat:
    """The seat whose work has this id.

    Raises:
        ProblemError: ``assignment_expired``.
    """
    seat = state.seat_with(assignment_id)
    if seat is None:
        raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")
    return seat
