"""Replay: recompute a run's alpha from its log, round by round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.codec import decode
from fedone_sdk.aggregator.rounds.curves import Curves, check_curves
from fedone_sdk.aggregator.rounds.events import Event, RaiseRequested, Refused, RollbackRequested
from fedone_sdk.aggregator.rounds.prompts import updated_local
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Memory, State, alpha_sha256, dump_memory, load_memory
from fedone_sdk.budget import Budget
from fedone_sdk.errors import FedOneError
from fedone_sdk.messages import Array
from fedone_sdk.messages.ndarray import from_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry, RunSnapshot
from fedone_sdk.vocabulary import Vocabulary

_ROUNDING = 1e-5
"""Tolerance, relative to an array's maximum, for rounding differences between machines."""

_Index = Annotated[int, Field(ge=0, lt=2**53)]


class _CurvesRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    means: Array
    counts: tuple[Annotated[int, Field(ge=0, le=2**31)], ...]


class _SeatRecord(BaseModel):
    """A finished seat in the log; its arrays are extra fields."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    slot: _Index
    client: _Index
    num_samples: Annotated[int, Field(ge=0)]
    weight: Annotated[int, Field(ge=1)]
    queries: _Index = 0
    mean_loss: float = 0.0
    losses: tuple[tuple[float, ...], ...] = ()
    curves: tuple[_CurvesRecord, ...] = ()

    def arrays(self) -> dict[str, Any]:
        """Return alpha and the method's memory, by name."""
        return {
            name: from_wire(Array.model_validate(value))
            for name, value in (self.model_extra or {}).items()
            if isinstance(value, dict) and "dtype" in value
        }


class _RoundRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    round: _Index
    seats: Annotated[tuple[_SeatRecord, ...], Field(min_length=1)]
    candidates: tuple[tuple[str, str], ...] = ()
    plan: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    alpha_sha256: str


class _BudgetRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    round: _Index
    cap: Budget


class _RollbackRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    round: _Index
    alpha_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The recomputed state after a line of the log.

    Attributes:
        entry: The line; None before the first round.
        state: The run; only alpha, the memories and the round are filled in.
        memories: The clients' method memories, by client index (losses exchange).
        logged_sha256: Digest of alpha in the line.
    """

    entry: LogEntry | None
    state: RunState
    memories: Mapping[int, Memory]
    logged_sha256: str

    @property
    def alpha_sha256(self) -> str:
        """Digest of the recomputed alpha."""
        return alpha_sha256(self.state.method.alpha)

    @property
    def agrees(self) -> bool:
        """Whether the recomputed alpha equals the logged one."""
        return self.alpha_sha256 == self.logged_sha256


def machine_of(snapshot: RunSnapshot) -> RoundMachine:
    """Return the machine of a stored run.

    Raises:
        ValueError: The stored spec is damaged.
    """
    record = snapshot.record
    spec = RunSpec.model_validate_json(record.spec)
    vocabulary = Vocabulary.parse(record.candidates)
    return _machine(record.run_id, spec, vocabulary)


def _machine(run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> RoundMachine:
    return RoundMachine.of(run_id, spec, vocabulary)


def replay(
    spec: RunSpec, vocabulary: Vocabulary, entries: Iterable[LogEntry]
) -> Iterator[Replayed]:
    """Recompute a run from its log, with the code of the round machine.

    Lines that do not change alpha are skipped. After a difference the replay continues from the
    recomputed alpha.

    Args:
        spec: The run.
        vocabulary: Its candidates.
        entries: Its log, oldest line first.

    Yields:
        The state after each round and each rollback.

    Raises:
        ValueError: A line is damaged or belongs to another run; the message has its number.
    """
    return _replay(_machine(spec.name, spec, vocabulary), list(entries))


def _replay(machine: RoundMachine, entries: Sequence[LogEntry]) -> Iterator[Replayed]:
    return _Replay(machine, _rollbacks(entries)).follow(entries)


def _rollbacks(entries: Iterable[LogEntry]) -> set[int]:
    """Return the target rounds of all rollbacks."""
    return {
        _RollbackRecord.model_validate_json(entry.body).round
        for entry in entries
        if entry.kind == "rollback"
    }


class _Replay:
    """Recomputes a run page by page. Raised caps change no alpha and yield nothing.

    Args:
        machine: The machine of the run.
        kept: Target rounds of the log's rollbacks.
    """

    def __init__(self, machine: RoundMachine, kept: Set[int]) -> None:
        self._machine = machine
        self._targets = kept
        self._state = machine.initial_state()
        self._memories: Mapping[int, Memory] = {}
        self._kept: dict[int, tuple[RunState, Mapping[int, Memory]]]
        self._kept = {0: (self._state, self._memories)}
        self._number = 0

    def follow(self, entries: Iterable[LogEntry]) -> Iterator[Replayed]:
        """Apply the next lines of the log."""
        for entry in entries:
            self._number += 1
            if entry.kind not in _RECORDS:
                continue
            line = _parse(entry, self._number)
            try:
                if isinstance(line, _BudgetRecord):
                    self._state = _step(self._machine, self._state, RaiseRequested(caps=line.cap))
                    continue
                logged = self._apply(line)
            except ValueError as exc:
                raise ValueError(f"line {self._number} of the log: {exc}") from exc
            if self._state.round in self._targets:
                self._kept[self._state.round] = self._state, self._memories
            yield Replayed(
                entry=entry, state=self._state, memories=self._memories, logged_sha256=logged
            )

    def _apply(self, line: _RoundRecord | _RollbackRecord) -> str:
        """Apply a line; return the digest of alpha in it."""
        if isinstance(line, _RoundRecord):
            if line.round != self._state.round:
                raise ValueError(f"it is of round {line.round}, not {self._state.round}")
            self._state, self._memories = _round(self._machine, self._state, self._memories, line)
            return line.alpha_sha256
        if line.round not in self._kept or line.round > self._state.round:
            raise ValueError(f"there is no round {line.round} to go back to")
        back, self._memories = self._kept[line.round]
        self._state = _roll_back(self._machine, self._state, back)
        return line.alpha_sha256 or alpha_sha256(back.method.alpha)


class Lookback:
    """Recomputes the state of a run after `to_round` rounds, for a rollback.

    Rounds that an earlier rollback discarded do not count.

    Args:
        spec: The run.
        vocabulary: Its candidates.
        rollbacks: The lines of its log of kind ``rollback``.
        to_round: Number of rounds.
    """

    def __init__(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary,
        rollbacks: Iterable[LogEntry],
        to_round: int,
    ) -> None:
        self._machine = _machine(spec.name, spec, vocabulary)
        self._replay = _Replay(self._machine, _rollbacks(rollbacks))
        self._to_round = to_round
        start = self._machine.initial_state()
        self._found = Replayed(
            entry=None, state=start, memories={}, logged_sha256=alpha_sha256(start.method.alpha)
        )

    def follow(self, entries: Iterable[LogEntry]) -> None:
        """Apply the next lines of the whole log.

        Raises:
            FedOneError: The recomputed alpha differs from the logged one.
            ValueError: The log is damaged.
        """
        name = self._machine.spec.name
        for line in self._replay.follow(entries):
            if self._machine.repeats_exactly and not line.agrees:
                raise FedOneError(
                    f"the log of run {name!r} gives another alpha after {line.state.round} rounds"
                )
            if line.state.round == self._to_round:
                self._found = line

    def found(self) -> Replayed:
        """Return the state after `to_round` rounds, once the whole log is applied.

        Raises:
            FedOneError: The log has fewer rounds.
        """
        if self._found.state.round != self._to_round:
            name = self._machine.spec.name
            raise FedOneError(f"run {name!r} has not done {self._to_round} rounds")
        return self._found


def at_round(
    spec: RunSpec, vocabulary: Vocabulary, entries: Sequence[LogEntry], to_round: int
) -> Replayed:
    """Return the state of a run after `to_round` rounds, without rounds that were rolled back.

    Raises:
        FedOneError: The log has fewer rounds, or the recomputed alpha differs from the logged one.
        ValueError: The log is damaged.
    """
    lookback = Lookback(spec, vocabulary, entries, to_round)
    lookback.follow(entries)
    return lookback.found()


def _roll_back(machine: RoundMachine, state: RunState, back: RunState) -> RunState:
    event = RollbackRequested(
        method=back.method,
        to_round=back.round,
        reason="",
    )
    return _step(machine, state, event)


def _step(machine: RoundMachine, state: RunState, event: Event) -> RunState:
    state, effects = machine.step(state, event, 0.0)
    for effect in effects:
        if isinstance(effect, Refused):
            raise ValueError(effect.detail)
    return state


_RECORDS: Mapping[str, type[_RoundRecord | _RollbackRecord | _BudgetRecord]] = {
    "round": _RoundRecord,
    "rollback": _RollbackRecord,
    "budget": _BudgetRecord,
}


def _parse(entry: LogEntry, number: int) -> _RoundRecord | _RollbackRecord | _BudgetRecord:
    try:
        return _RECORDS[entry.kind].model_validate_json(entry.body)
    except ValueError as exc:
        raise ValueError(f"line {number} of the log is no {entry.kind}: {exc}") from exc


def _round(
    machine: RoundMachine, state: RunState, memories: Mapping[int, Memory], record: _RoundRecord
) -> tuple[RunState, dict[int, Memory]]:
    """Recompute a round from its clients' updates."""
    memories = dict(memories)
    state = machine.with_plan(replace(state, waiting=record.candidates), record.plan)
    machine = machine.at(state)
    seats: list[Seat] = []
    # In the order in which seats were finished: a client may have had two seats.
    for line in record.seats:
        seat = Seat(
            slot=line.slot,
            client=line.client,
            phase="done",
            due=0.0,
            num_samples=line.num_samples,
            queries=line.queries,
            weight=line.weight,
            mean_loss=line.mean_loss,
        )
        if line.losses:
            seat = _replay_seat(machine, state, seat, line, memories.get(line.client))
            if machine.remembers_clients and seat.local is not None and seat.local.memory:
                memories[line.client] = seat.local.memory
        elif arrays := line.arrays():
            if "alpha" not in arrays:
                raise ValueError(f"seat {line.slot} has no alpha")
            seat = replace(seat, local=State(alpha=arrays.pop("alpha"), memory=arrays))
        seats.append(seat)
    state, _ = machine.finish_round(replace(state, seats=tuple(seats)), 0.0)
    return state, memories


def _replay_seat(
    machine: RoundMachine, state: RunState, seat: Seat, line: _SeatRecord, memory: Memory | None
) -> Seat:
    """Return a seat after local steps with the logged losses."""
    if memory:
        seat = replace(seat, local=replace(state.method, memory=memory))
    most = machine.spec.method.num_samples
    for values, curves in zip(line.losses, _curves(machine, line), strict=True):
        if len(values) > most:
            raise ValueError(
                f"seat {seat.slot} has {len(values)} losses, at most {most} are allowed"
            )
        seat = replace(seat, num_samples=len(values))
        local = updated_local(machine, state, seat, values, curves)
        seat = replace(
            seat,
            step=seat.step + 1,
            local=local,
            losses=(*seat.losses, values),
            curves=seat.curves if curves is None else (*seat.curves, curves),
        )
    return seat


def _curves(machine: RoundMachine, line: _SeatRecord) -> list[Curves | None]:
    """Return a seat's losses by class and label bias, per local step."""
    if machine.biases is None:
        return [None] * len(line.losses)
    found = [Curves(one.means, one.counts) for one in line.curves]
    if len(found) != len(line.losses):
        raise ValueError(f"seat {line.slot} has losses by class for {len(found)} steps")
    for curves, losses in zip(found, line.losses, strict=True):
        check_curves(curves, losses, machine.biases)
    return [*found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between a replay and the run.

    Attributes:
        round: Number of rounds at that point.
        what: The part that differs: ``alpha`` after a round, or a part of the newest state.
        stored: Digest of the stored value.
        replayed: Digest of the recomputed value.
    """

    round: int
    what: str
    stored: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"{self.what} differs after {self.round} rounds: the run has {self.stored}, "
            f"the replay {self.replayed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of the replay of a stored run.

    Attributes:
        run_id: The run.
        rounds: Number of recomputed rounds, including rounds that were rolled back later.
        rollbacks: Number of rollbacks.
        alpha_sha256: Digest of the newest recomputed alpha.
        difference: The first difference; None if there is none.
    """

    run_id: str
    rounds: int
    rollbacks: int
    alpha_sha256: str
    difference: Difference | None

    @property
    def agrees(self) -> bool:
        """Whether the replay equals the run."""
        return self.difference is None


def compare(snapshot: RunSnapshot) -> ReplayReport:
    """Replay a stored run and compare alpha after every round, and the newest state.

    The newest state includes the round, the caps, and the memories of the method, the server
    optimiser, the defences and the clients. If the method's linear algebra depends on the processor
    (`repeats_exactly` is False), only the newest state is compared, with a tolerance.

    Raises:
        ValueError: The log or the state is damaged.
    """
    machine = machine_of(snapshot)
    document = json.loads(snapshot.record.document)
    document.pop("counters", None)
    stored = decode(document, snapshot.record.arrays)
    state, memories = machine.initial_state(), dict[int, Memory]()
    counts = {"round": 0, "rollback": 0}
    difference: Difference | None = None
    computed = alpha_sha256(state.method.alpha)
    for line in _replay(machine, snapshot.log):
        state, memories, computed = line.state, dict(line.memories), line.alpha_sha256
        if line.entry is not None:
            counts[line.entry.kind] += 1
        if machine.repeats_exactly and not line.agrees:
            difference = Difference(
                round=state.round,
                what="alpha",
                stored=line.logged_sha256,
                replayed=line.alpha_sha256,
            )
            break
    else:
        kept = {client: load_memory(value) for client, value in snapshot.memories}
        state = machine.with_plan(state, stored.planned)  # A plan can change during a round.
        if not machine.repeats_exactly:
            state = _unless_close(state, stored)
            memories = kept if _are_close(_flatten(kept), _flatten(memories)) else memories
        for what, theirs, ours in (
            ("the cap", str(stored.account.cap), str(state.account.cap)),
            ("the number of rounds", str(stored.round), str(state.round)),
            ("alpha", alpha_sha256(stored.method.alpha), alpha_sha256(state.method.alpha)),
            ("the method's memory", _sha256(stored.method.memory), _sha256(state.method.memory)),
            ("the defences' memory", _sha256(stored.defence), _sha256(state.defence)),
            ("the clients' memory", _sha256(_flatten(kept)), _sha256(_flatten(memories))),
        ):
            if theirs != ours:
                difference = Difference(round=state.round, what=what, stored=theirs, replayed=ours)
                break
    return ReplayReport(
        run_id=snapshot.record.run_id,
        rounds=counts["round"],
        rollbacks=counts["rollback"],
        alpha_sha256=computed,
        difference=difference,
    )


def _flatten(memories: Mapping[int, Memory]) -> Memory:
    return {
        f"{client}/{name}": values
        for client, memory in memories.items()
        for name, values in memory.items()
    }


def _unless_close(state: RunState, stored: RunState) -> RunState:
    """Return the replayed state, with stored arrays in place of those within the tolerance."""
    ours, theirs = state.method, stored.method
    if _are_close({"alpha": theirs.alpha}, {"alpha": ours.alpha}):
        ours = ours.evolve(alpha=theirs.alpha)
    if _are_close(theirs.memory, ours.memory):
        ours = ours.evolve(memory=theirs.memory)
    return replace(state, method=ours)


def _are_close(some: Memory, others: Memory) -> bool:
    """Whether two memories are equal within the tolerance."""
    if some.keys() != others.keys():
        return False
    for name, values in some.items():
        other = others[name]
        if values.shape != other.shape or values.dtype != other.dtype:
            return False
        reach = _ROUNDING * np.abs(values).max(initial=0.0) if values.dtype.kind == "f" else 0.0
        if values.size and not np.abs(values - other).max() <= reach:
            return False
    return True


def _sha256(memory: Memory) -> str:
    return hashlib.sha256(dump_memory(memory)).hexdigest()
