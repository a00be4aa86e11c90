"""The fixed parts of a run: its method, defences, limits and seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk import algorithms
from fedone_sdk.aggregator.rounds.by_class import ByClass
from fedone_sdk.aggregator.rounds.privacy import Releases
from fedone_sdk.aggregator.rounds.run_state import Result, RunState, Seat
from fedone_sdk.algorithms import Candidates, State
from fedone_sdk.algorithms.defence import Defence
from fedone_sdk.algorithms.gradient import PolicyGradient
from fedone_sdk.algorithms.method import Holder, clip_losses
from fedone_sdk.algorithms.space import Space, Start
from fedone_sdk.budget import NOTHING, Account, Budget, Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.losses import num_groups, probability_noise
from fedone_sdk.messages import MAX_ELEMENTS, MetricReport
from fedone_sdk.spec import OwnMethodSpec, RunSpec, SearchSpec
from fedone_sdk.task import Bias
from fedone_sdk.vocabulary import CHARS_PER_TOKEN, MAX_PROPOSALS, Layout, Vocabulary

MIN_SAMPLES = 2
"""Minimal number I of prompts per local step, because the gradient estimator divides by I - 1."""

MAX_SNAPSHOTS = 100
"""Maximal number of rounds to which a run can be rolled back, in addition to its start."""

ONE_QUERY = Usage(queries=1)
"""Default upper bound on the cost of a query: one query, and 0 requests, tokens and dollars."""

_STRIDE = 1 << 32
"""Number that `seed_of` adds to a draw's index for each rollback. It is larger than any index."""

P = ParamSpec("P")
T = TypeVar("T")

_MAX_STDS = 10.0
"""Noise of an honest update is practically never larger than this many standard deviations."""

_ROUNDING = 1.001
"""Factor by which float32 rounding may enlarge a change of alpha (the method's parameters)."""

_SLOW_SIZE = 1 << 16
"""Up to this number of entries of alpha, the handling of an update takes a few milliseconds."""


@dataclass(eq=False)
class RoundMachine:
    """The fixed parts of a run, which its handlers read.

    A handler is a pure function ``(machine, state, now, **data) -> Result`` of this package. It
    makes one decision about the run; `now` is in seconds since the epoch. In the exchange
    ``losses`` a client returns the losses of its prompts, in ``alpha`` the changed parameters.

    Args:
        vocab_size: Number of candidates, N, including the ones that may be added during the run.
        blank: Index of the empty candidate that all positions share; None without one.
        layout: The slots (`Vocabulary.layout`); empty if all positions have the same candidates.
        start: The known prompt to start from, as indices of candidates (`PromptSpec.warm_start`).
        planned: Number of queries over which the method spreads its search; by default from `spec`.
        worst_query: Upper bound on the cost of one query.
        worst_grades: Upper bound on the cost of a judge's grades of the texts of one query. An
            assignment does not reserve this cost, but the caps must cover it.
        gateway_model: Fingerprint of the gateway's model; empty if it is not known yet, None if
            clients query their own models.

    Raises:
        MissingExtraError: The method or the privacy needs a library that is not installed.
        ValueError: A message would exceed the size limit, or the spec does not fit the method.
    """

    CLAIM_TIMEOUT_S: ClassVar = 10.0
    """A drawn client must claim within this time, enough for a reconnection and a round trip."""

    MAX_RENEWALS: ClassVar = 10
    """How often a device may restart its deadline; after that, the deadline ends its work."""

    MAX_LOST: ClassVar = 50
    """The run fails if more than this many assignments in a row are lost, and each waiting client
    has lost one in this round. A lost assignment may cost its whole lease (the reserved amount).
    Without this limit, a run whose model never answers would spend its whole budget."""

    MAX_STRIKES: ClassVar = 3
    """A client that loses a seat gets strikes; an update removes one. With this many strikes the
    client is set aside: it gets no work for ``deadline_s``. Each further strike doubles the time,
    up to `LONGEST_ASIDE_S`."""

    LONGEST_ASIDE_S: ClassVar = 86_400.0

    run_id: str
    spec: RunSpec
    _: KW_ONLY
    vocab_size: int
    blank: int | None = None
    layout: Layout = ()
    start: Start | None = None
    vocabulary: Vocabulary | None = None
    planned: int | None = None
    worst_query: Usage = ONE_QUERY
    worst_grades: Usage = NOTHING
    gateway_model: str | None = None

    def __post_init__(self) -> None:
        spec, vocab_size, layout = self.spec, self.vocab_size, self.layout
        self._proposed: tuple[tuple[str, str], ...] = ()
        self._base: Any = self  # Type checkers refuse Self here.
        self._variants: dict[tuple[int, int | None], Self] = {}
        self.shape = spec.prompt.length, vocab_size
        self.losses_exchange = spec.participation.exchange == "losses"
        self.calibrates = spec.calibration.kind == "labels"
        self.num_labels = len(spec.task.labels) if self.calibrates else 1
        self.num_groups = num_groups(self.num_labels, private=spec.privacy is not None)
        sizes = {
            "alpha": math.prod(self.shape),
            "an assignment": spec.method.num_samples * spec.prompt.length,
            "an answer of the gateway": spec.method.num_samples
            * spec.method.batch_size
            * max(len(spec.task.labels), 1),
        }
        if self.losses_exchange:
            sizes["an update"] = spec.method.num_samples * self.num_groups * (2 + self.num_labels)
        for what, size in sizes.items():
            if size > MAX_ELEMENTS:
                raise ValueError(f"{what} would hold {size} numbers; the limit is {MAX_ELEMENTS}")
        self.method = algorithms.method_from_spec(
            spec.method,
            Space.of(layout or [(spec.prompt.length, vocab_size, self.blank)], vocab_size),
            seed=spec.seed,
            num_labels=self.num_labels,
            num_groups=self.num_groups,
            asks=self.planned_asks if self.losses_exchange else None,
            start=self.start,
        )
        if isinstance(spec.method, OwnMethodSpec) and self.method.shares_memory:
            spec.check_shared_memory(spec.method.label, "its memories")
        # A cache, because the assignment, the gateway and the update need the same prompts.
        self.drawn: dict[tuple[int, ...], tuple[State, Candidates]] = {}
        self.defence = _defence_of(spec, self.method)
        self.releases = None if spec.privacy is None else Releases(spec, spec.privacy)
        noised = spec.privacy is not None and spec.privacy.target == "losses"
        # Devices clip before they add noise. Clipping again would bias the mean.
        self.loss_clip = None if noised else spec.defence.loss_clip

    def handle(
        self,
        state: RunState,
        now: float,
        handler: Callable[Concatenate[Self, RunState, float, P], Result[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result[T]:
        """Call a handler with the machine for the state (`at`), and return the handler's result.

        Raises:
            ProblemError: The handler refuses the request; the state does not change.
        """
        return handler(self.at(state), state, now, *args, **kwargs)

    @classmethod
    def of(cls, run_id: str, spec: RunSpec, vocabulary: Vocabulary, **options: Any) -> Self:
        """Create the machine of a run; `options` are further arguments of the constructor."""
        return cls(
            run_id,
            spec,
            vocab_size=spec.prompt.capacity(vocabulary),
            blank=vocabulary.blank,
            layout=vocabulary.layout(spec.prompt.length) if vocabulary.slots else (),
            start=spec.prompt.warm_start(vocabulary),
            vocabulary=vocabulary,
            **options,
        )

    def at(self, state: RunState) -> Self:
        """Return the machine with a state's added candidates and its number of planned queries."""
        if state.proposed == self._proposed and state.planned == self.planned:
            return self
        if self is not self._base:
            base: Self = self._base
            return base.at(state)
        key = len(state.proposed), state.planned
        known = self._variants.get(key)
        if known is None or known._proposed != state.proposed:
            counts = Counter(slot for slot, _ in state.proposed)
            names = [slot.name for slot in self.spec.prompt.slots]
            layout = tuple(
                (repeat, size + counts[name], blank)
                for name, (repeat, size, blank) in zip(names, self.layout, strict=True)
            )
            known = replace(
                self,
                # Only slots get new candidates, and `layout` has the empty candidate of each slot.
                blank=None if state.proposed else self.blank,
                layout=layout,
                planned=state.planned,
            )
            known._base, known._proposed = self, state.proposed
            self._variants[key] = known
        variant: Self = known
        return variant

    def with_model(self, fingerprint: str, worst_query: Usage) -> Self:
        """Return the machine of the same run with the gateway's current model and its costs."""
        machine = self._copied()
        machine.gateway_model, machine.worst_query = fingerprint, worst_query
        return machine

    def with_grades(self, worst_grades: Usage) -> Self:
        """Return the machine of the same run with a judge's costs."""
        machine = self._copied()
        machine.worst_grades = worst_grades
        return machine

    def _copied(self) -> Self:
        """Return a copy without the variants, which have the fields of this machine."""
        machine = copy(self)
        machine._base, machine._variants = machine, {}
        return machine

    def with_new_candidates(self, method: State) -> State:
        """Return a state of the method, with parameters for candidates that were added later."""
        space = getattr(self.method, "space", None)
        if not isinstance(space, Space):
            return method
        return method.evolve(alpha=self.method.project(space.admitted(method.alpha)))

    def scores_whole(self, num_rows: int) -> bool:
        """Whether a mini-batch contains all of a client's rows; False under privacy."""
        return self.spec.privacy is None and num_rows <= self.spec.method.batch_size

    @property
    def remembers_clients(self) -> bool:
        """Whether the server stores a memory of the method for each client between rounds."""
        if isinstance(self.spec.method, OwnMethodSpec):
            return not self.method.shares_memory
        return self.losses_exchange and self.spec.method.keeps_client_state

    @property
    def snapshot_every(self) -> int:
        """Number of rounds between two snapshots; a run can be rolled back only to snapshots."""
        return math.ceil(self.spec.rounds / MAX_SNAPSHOTS)

    @property
    def is_slow(self) -> bool:
        """Whether the method may take long: a search, a user-defined method, or a large alpha."""
        method = self.spec.method
        if method.pools or isinstance(method, OwnMethodSpec):
            return True
        return math.prod(self.shape) > _SLOW_SIZE

    @property
    def planned_asks(self) -> int:
        """Number of calls of the method's `ask` within the run's rounds and its cap on queries."""
        return self.planned_queries // self.spec.method.num_samples

    @property
    def planned_queries(self) -> int:
        """Number of queries over which the method spreads its search (see `with_current_plan`)."""
        return self.planned_under(self.spec.budget) if self.planned is None else self.planned

    def planned_under(self, budget: Budget | None) -> int:
        """Return the number of training queries that the run's rounds and a cap allow."""
        spec = self.spec
        per_round = spec.participation.clients_per_round * spec.method.local_steps
        planned = spec.rounds * per_round * spec.method.num_samples
        cap = None if budget is None else budget.queries
        if cap is None:
            return planned
        if spec.prompt.proposer is not None and spec.prompt.reflects:
            # In assignments with a reflection, one more query tries the text that a device wrote.
            paid = spec.method.num_samples * spec.prompt.proposer.every
            cap = cap * paid // (paid + 1)
        return min(planned, cap)

    def more_asks(self, budget: Budget | None) -> bool:
        """Whether a cap allows more calls of `ask` than `planned_asks`."""
        return self.planned_under(budget) // self.spec.method.num_samples > self.planned_asks

    def with_current_plan(self, state: RunState) -> RunState:
        """Return the state with the number of planned queries that its current caps allow.

        The number affects which prompts are drawn, so it stays the same once work of the round is
        assigned. If it grows, a search in its last phase draws new prompts again.
        """
        started = any(seat.phase != "offered" or seat.step for seat in state.seats)
        cap = state.account.cap
        if started or not self.spec.method.pools or not self.more_asks(cap):
            return state
        planned = self.planned_under(cap)
        if planned == state.planned:
            return state
        return replace(state, planned=planned, method=self.method.search_on(state.method))

    @property
    def min_clients(self) -> int:
        """Number of clients that must wait for work before the first round starts."""
        wanted = self.spec.participation.min_clients
        if wanted is not None:
            return wanted
        if self.spec.data is not None:
            return self.spec.data.num_clients
        uniform = self.spec.participation.selection == "uniform"
        return self.spec.participation.clients_per_round if uniform else 1

    def admits(self, *, own_model: bool) -> bool:
        """Whether a client may take part; `own_model` says that it has a model of its own."""
        no_gateway = self.gateway_model is None
        return not own_model or no_gateway or self.spec.participation.own_models is not None

    @property
    def required_model(self) -> str | None:
        """Fingerprint of the only model that may score; None if the first device decides this.

        Empty if only the gateway's model may score, and its fingerprint is not known yet.
        """
        pinned = self.spec.participation.model
        return pinned if self.gateway_model is None else self.gateway_model

    def initial_state(self) -> RunState:
        """Return the initial state of the run."""
        return RunState(
            method=self.method.init(),
            account=Account(cap=self.spec.budget),
            evaluation=Account(),
            model=self.required_model or None,
            metric=MetricReport(name=self.spec.task.metric),
        )

    def vacancies(self, state: RunState) -> int:
        """Return the number of seats in the round (the places for clients) without a client."""
        if not state.running:
            return 0
        taken = {seat.number for seat in state.seats}
        return self.spec.participation.clients_per_round - len(taken)

    def is_exhausted(self, state: RunState) -> bool:
        """Whether no lease is open, and the budget is too small for another assignment."""
        return not state.account.leases and self.affordable_work(state) is None

    def needs_seating(self, state: RunState) -> bool:
        """Whether `seats.fill` has to draw clients, or to end the run because of its budget."""
        return state.running and bool(self.vacancies(state) or self.is_exhausted(state))

    def affordable_work(
        self, state: RunState, local: State | None = None
    ) -> tuple[int, int] | None:
        """Return how many prompts and local steps the caps allow for an assignment, or None.

        `local` is the client's state of the method; None if it equals the run's.
        """
        steps = 1 if self.losses_exchange else self.spec.method.local_steps
        most = self.spec.method.num_samples
        if self.losses_exchange:
            most = min(most, max(self.method.wanted(local or state.method), MIN_SAMPLES))
        worst = self.worst_query + self.worst_grades
        for count in range(steps, 0, -1):
            samples = state.account.affordable(worst * count, most)
            if samples >= MIN_SAMPLES:
                return samples, count
        return None

    # Prompts

    def candidates(self, state: RunState, seat: Seat) -> Candidates:
        """Return the prompts of a seat's current local step."""
        base = seat.local or state.method
        key = (seat.client, seat.number, seat.step, seat.num_samples, state.round, state.rollbacks)
        known = self.drawn.get(key)
        if known is not None and known[0] is base:
            return known[1]
        rng = algorithms.stream(self.seed(state, seat, "prompts", seat.step))
        drawn = self.method.ask(base, rng, seat.num_samples, Holder(seat.client, seat.whole))
        drawn = self._without_own(state, seat.client, drawn)
        if len(self.drawn) >= 2 * self.spec.participation.clients_per_round:
            self.drawn.clear()
        self.drawn[key] = (base, drawn)
        return drawn

    def _without_own(self, state: RunState, client: int, drawn: Candidates) -> Candidates:
        """Replace a client's own candidates by their parents: it must not score its own texts."""
        written_by_client = [origin for origin in state.lineage if origin.client == client]
        if not written_by_client:
            return drawn
        texts = [text for _, text in state.proposed]
        prompts, position = drawn.prompts.copy(), self.proposed_position
        sizes = [size for repeat, size, _ in self.layout for _ in range(repeat)]
        first = sizes[position] - len(texts)
        for origin in reversed(written_by_client):  # The client may also have written the parent.
            if origin.text in texts:
                affected = prompts[:, position] == first + texts.index(origin.text)
                prompts[affected, position] = origin.parents[0]
        return replace(drawn, prompts=prompts)

    @property
    def proposed_position(self) -> int:
        """Index of the first position of the slot that the proposer writes for."""
        names = [slot.name for slot in self.spec.prompt.slots for _ in range(slot.repeat)]
        return names.index(self.spec.prompt.proposed_slot or "")

    def may_propose(self, state: RunState, client: int) -> bool:
        """Whether a client may propose a candidate in the current round."""
        proposer = self.spec.prompt.proposer
        if proposer is None or not self.spec.prompt.reflects or not self.losses_exchange:
            return False
        halving = self.spec.method.halving if isinstance(self.spec.method, SearchSpec) else 0.0
        asked = state.round * self.spec.participation.clients_per_round
        # The successive halving at the end of a search evaluates no new prompts.
        searching = asked + 1 < (1 - halving) * self.planned_asks
        due = searching and (state.round + 1) % proposer.every == 0
        number = sum(origin.client == client for origin in state.lineage)
        room = len(state.added) < proposer.max_candidates
        trusted = client not in state.quarantined
        return due and room and trusted and number < MAX_PROPOSALS

    # Seeds. Draws are not stored, because a draw can be repeated from its seed.

    def seed(self, state: RunState, seat: Seat, purpose: str, step: int) -> int:
        """Return the seed of a seat's draw in a local step."""
        # A draw with replacement may give a client two seats in a round, which need two seeds.
        position = seat.number * self.spec.method.local_steps + step
        return self.seed_of(state, purpose, seat.client, position)

    def seed_of(self, state: RunState, purpose: str, client: int, position: int) -> int:
        """Return the seed of a draw in the current round.

        `client` is an enrolment index, or 0 for draws of the server. `position` is the index of the
        draw among the draws of the same purpose and client.
        """
        # After a rollback, a repeated round must draw other clients and prompts.
        step = position + state.rollbacks * _STRIDE
        return algorithms.stream_seed(self.spec.seed, purpose, state.round, client, step)

    def longest_step(self, alpha: NDArray[np.float32], num_steps: int) -> float:
        """Return the most by which a client can change an entry of alpha in the alpha exchange."""
        if not isinstance(self.method, PolicyGradient):
            return math.inf
        privacy = self.spec.privacy
        noise = 0.0
        if privacy is not None and privacy.target == "alpha":
            noise = privacy.clip * (1.0 + _MAX_STDS * privacy.noise_multiplier)
        return self.method.longest_step(alpha, num_steps) * _ROUNDING + noise

    def as_losses(
        self, candidates: Candidates, losses: Sequence[float], by_class: ByClass | None
    ) -> NDArray[np.float64] | algorithms.ClassLosses:
        """Return a client's losses as the input of the method's `tell`."""
        price = self._length_price(candidates)
        if by_class is None or candidates.biases is None:
            return self.clipped(losses) + price
        privacy, noise = self.spec.privacy, None
        if privacy is not None:
            size = self.spec.method.batch_size
            noise = probability_noise(privacy.noise_multiplier, len(losses), size)
        class_losses = by_class.class_losses(
            candidates.biases, self.loss_clip, groups=self.num_groups, noise=noise
        )
        return class_losses.plus(price)

    def _length_price(self, candidates: Candidates) -> NDArray[np.float64]:
        """Return the penalty for the length of each prompt (`PromptSpec.length_penalty`)."""
        penalty = self.spec.prompt.length_penalty
        if not penalty or self.vocabulary is None:
            return np.zeros(len(candidates.prompts))
        words = self.vocabulary.with_candidates(self._proposed)
        lengths = [words.length(row) for row in candidates.prompts.tolist()]
        return penalty * np.array(lengths) / CHARS_PER_TOKEN

    def clipped(self, losses: ArrayLike) -> NDArray[np.float64]:
        """Return losses clipped to ``defence.loss_clip``."""
        return clip_losses(np.array(losses, dtype=np.float64), self.loss_clip)

    def bias(self, state: RunState) -> Bias | None:
        """Return the label bias of the prompt that the run would return now, if it has one."""
        bias = self.method.bias(state.method)
        return None if bias is None else tuple(bias.tolist())

    def plain_bias(self, state: RunState) -> Bias | None:
        """Return the label bias of the model without a prompt, if the run has estimated it."""
        bias = self.method.plain_bias(state.method)
        return None if bias is None else tuple(bias.tolist())


def _defence_of(spec: RunSpec, method: algorithms.Algorithm) -> Defence | None:
    """Return a run's defence. If the spec has none, only steps of SGD are bounded."""
    wanted = spec.defence
    if wanted.checks_updates:
        return Defence(
            num_samples=spec.method.num_samples,
            # A method with a memory computes alpha from it, so scaling alpha has no effect.
            trust_region=None if method.shares_memory else wanted.trust_region,
            outliers=wanted.outliers,
            quarantine=wanted.quarantine,
        )
    if not isinstance(method, PolicyGradient) or method.optimizer != "sgd":
        return None
    return Defence(
        num_samples=spec.method.num_samples, trust_region=wanted.widest_region, only_bounds=True
    )


def invalid(detail: str) -> ProblemError:
    """Return the error for a message that does not fit its assignment."""
    return ProblemError("invalid_message", detail)


def find_seat(state: RunState, assignment_id: str) -> Seat:
    """Return the seat of an open assignment; raise ``assignment_expired`` if it has ended."""
    seat = state.seat_with(assignment_id)
    if seat is None:
        raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")
    return seat
