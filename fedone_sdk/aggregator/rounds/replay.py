"""Replay: a run's alpha computed again, round by round, from nothing but its log."""

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
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Memory, State, alpha_sha256, dump_memory, load_memory
from fedone_sdk.budget import Budget
from fedone_sdk.errors import FedOneError
from fedone_sdk.messages import Array
from fedone_sdk.messages.ndarray import from_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry, RunSnapshot
from fedone_sdk.vocabulary import Vocabulary

__all__ = [
    "Difference",
    "Lookback",
    "ReplayReport",
    "Replayed",
    "at_round",
    "compare",
    "machine_of",
    "replay",
]

_ROUNDING = 1e-5
"""Share of an array's largest number: what two machines' roundings make of a search, and more."""

_Index = Annotated[int, Field(ge=0, lt=2**53)]


class _CurvesRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    means: Array
    counts: tuple[Annotated[int, Field(ge=0, le=2**31)], ...]


class _SeatRecord(BaseModel):
    """A finished seat as the log has it; arrays stand under names of their own."""

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
        """Alpha and what else the method keeps, by name."""
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
    """Where the run stood after a line of its log.

    Attributes:
        entry: The line; None where no round was done yet.
        state: The run; only what rounds change is filled in: alpha, memories, the round.
        memories: What clients' methods remember, by client index (losses exchange).
        logged_sha256: Digest of alpha that the line names.
    """

    entry: LogEntry | None
    state: RunState
    memories: Mapping[int, Memory]
    logged_sha256: str

    @property
    def alpha_sha256(self) -> str:
        """Digest of the alpha that was computed."""
        return alpha_sha256(self.state.method.alpha)

    @property
    def agrees(self) -> bool:
        """Whether it is the alpha that the run had."""
        return self.alpha_sha256 == self.logged_sha256


def machine_of(snapshot: RunSnapshot) -> RoundMachine:
    """The machine of a stored run.

    Raises:
        ValueError: Its description is damaged.
    """
    record = snapshot.record
    spec = RunSpec.stored(record.spec)
    vocabulary = Vocabulary.parse(record.candidates)
    return _machine(record.run_id, spec, vocabulary)


def _machine(run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> RoundMachine:
    return RoundMachine.of(run_id, spec, vocabulary)


def replay(
    spec: RunSpec, vocabulary: Vocabulary, entries: Iterable[LogEntry]
) -> Iterator[Replayed]:
    """Computes a run again from its log, with the code that computed it first.

    Lines that change no alpha are passed over. After a line that does not agree the replay goes
    on from the alpha that it has computed itself.

    Args:
        spec: The run.
        vocabulary: Its candidates.
        entries: Its log, oldest line first.

    Yields:
        One for each round and each rollback.

    Raises:
        ValueError: A line is damaged, or is not of this run; the message names its place.
    """
    return _replay(_machine(spec.name, spec, vocabulary), list(entries))


def _replay(machine: RoundMachine, entries: Sequence[LogEntry]) -> Iterator[Replayed]:
    return _Replay(machine, _rollbacks(entries)).follow(entries)


def _rollbacks(entries: Iterable[LogEntry]) -> set[int]:
    """The rounds that are gone back to."""
    return {
        _RollbackRecord.model_validate_json(entry.body).round
        for entry in entries
        if entry.kind == "rollback"
    }


class _Replay:
    """Computes a run again, page by page of its log.

    What raised the caps moves no alpha, and is no line of its own in what comes out.

    Args:
        machine: Of the run.
        kept: Rounds that the log will go back to.
    """

    def __init__(self, machine: RoundMachine, kept: Set[int]) -> None:
        self._machine = machine
        self._targets = kept
        self._state = machine.start()
        self._memories: Mapping[int, Memory] = {}
        self._kept: dict[int, tuple[RunState, Mapping[int, Memory]]]
        self._kept = {0: (self._state, self._memories)}
        self._number = 0

    def follow(self, entries: Iterable[LogEntry]) -> Iterator[Replayed]:
        """The next lines of the log."""
        for entry in entries:
            self._number += 1
            if entry.kind not in _RECORDS:
                continue
            line = _parse(entry, self._number)
            try:
                if isinstance(line, _BudgetRecord):
                    self._state = _stepped(
                        self._machine, self._state, RaiseRequested(caps=line.cap)
                    )
                    continue
                logged = self._take(line)
            except ValueError as exc:
                raise ValueError(f"line {self._number} of the log: {exc}") from exc
            if self._state.round in self._targets:
                self._kept[self._state.round] = self._state, self._memories
            yield Replayed(
                entry=entry, state=self._state, memories=self._memories, logged_sha256=logged
            )

    def _take(self, line: _RoundRecord | _RollbackRecord) -> str:
        """Goes on to the state after a line; the digest of alpha that the line names."""
        if isinstance(line, _RoundRecord):
            if line.round != self._state.round:
                raise ValueError(f"it is of round {line.round}, not {self._state.round}")
            self._state, self._memories = _round(self._machine, self._state, self._memories, line)
            return line.alpha_sha256
        if line.round not in self._kept or line.round > self._state.round:
            raise ValueError(f"there is no round {line.round} to go back to")
        back, self._memories = self._kept[line.round]
        self._state = _rolled_back(self._machine, self._state, back)
        return line.alpha_sha256 or alpha_sha256(back.method.alpha)


class Lookback:
    """Where a run stood when it had done `to_round` rounds, on the way to where it stands now.

    Args:
        spec: The run.
        vocabulary: Its candidates.
        rollbacks: The lines of its log of kind ``rollback``.
        to_round: Rounds done.
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
        start = self._machine.start()
        self._found = Replayed(
            entry=None, state=start, memories={}, logged_sha256=alpha_sha256(start.method.alpha)
        )

    def follow(self, entries: Iterable[LogEntry]) -> None:
        """Goes on with the next lines of the whole log.

        Raises:
            FedOneError: The log gives another alpha than the run had.
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
        """Where it stood, after all of the log was followed.

        Raises:
            FedOneError: The log does not lead there.
        """
        if self._found.state.round != self._to_round:
            name = self._machine.spec.name
            raise FedOneError(f"run {name!r} has not done {self._to_round} rounds")
        return self._found


def at_round(
    spec: RunSpec, vocabulary: Vocabulary, entries: Sequence[LogEntry], to_round: int
) -> Replayed:
    """Where a run stood when it had done `to_round` rounds, on the way to where it stands now.

    Raises:
        FedOneError: Its log does not lead there, or gives another alpha than it had.
        ValueError: Its log is damaged.
    """
    lookback = Lookback(spec, vocabulary, entries, to_round)
    lookback.follow(entries)
    return lookback.found()


def _rolled_back(machine: RoundMachine, state: RunState, back: RunState) -> RunState:
    event = RollbackRequested(
        method=back.method,
        server_memory=back.server_memory,
        to_round=back.round,
        reason="",
    )
    return _stepped(machine, state, event)


def _stepped(machine: RoundMachine, state: RunState, event: Event) -> RunState:
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
    """A round, from what its clients returned."""
    memories = dict(memories)
    state = machine.with_plan(replace(state, waiting=record.candidates), record.plan)
    machine = machine.at(state)
    seats: list[Seat] = []
    # In the order in which they were finished: a client may have had two of them.
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
            seat = _told(machine, state, seat, line, memories.get(line.client))
            if machine.remembers_clients and seat.local is not None and seat.local.memory:
                memories[line.client] = seat.local.memory
        elif arrays := line.arrays():
            if "alpha" not in arrays:
                raise ValueError(f"seat {line.slot} has no alpha")
            seat = replace(seat, local=State(alpha=arrays.pop("alpha"), memory=arrays))
        seats.append(seat)
    state, _ = machine.finish_round(replace(state, seats=tuple(seats)), 0.0)
    return state, memories


def _told(
    machine: RoundMachine, state: RunState, seat: Seat, line: _SeatRecord, memory: Memory | None
) -> Seat:
    """A seat after its local steps gave the losses of its line in the log."""
    if memory:
        seat = replace(seat, local=replace(state.method, memory=memory))
    most = machine.spec.method.num_samples
    for values, curves in zip(line.losses, _curves(machine, line), strict=True):
        if len(values) > most:
            raise ValueError(f"seat {seat.slot} has {len(values)} losses, at most {most} are asked")
        seat = replace(seat, num_samples=len(values))
        local = machine.updated_local(state, seat, values, curves)
        seat = replace(
            seat,
            step=seat.step + 1,
            local=local,
            losses=(*seat.losses, values),
            curves=seat.curves if curves is None else (*seat.curves, curves),
        )
    return seat


def _curves(machine: RoundMachine, line: _SeatRecord) -> list[Curves | None]:
    """What a seat brought by class and label bias, step by step."""
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
    """Where a replay and the run part.

    Attributes:
        round: Rounds done by then.
        what: What differs: ``alpha`` after a round, or a part of the newest state.
        stored: Digest of what the run has.
        replayed: Digest of what was computed.
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
    """What a replay of a stored run found.

    Attributes:
        run_id: The run.
        rounds: Rounds that were computed again, those among them that were rolled back later.
        rollbacks: How often the run went back to an earlier round.
        alpha_sha256: Digest of the newest alpha that was computed.
        difference: The first difference; None if there is none.
    """

    run_id: str
    rounds: int
    rollbacks: int
    alpha_sha256: str
    difference: Difference | None

    @property
    def agrees(self) -> bool:
        """Whether all of it is what the run has."""
        return self.difference is None


def compare(snapshot: RunSnapshot) -> ReplayReport:
    """Computes a stored run again and compares: alpha after every round, and the newest state.

    Where another processor rounds a method's linear algebra otherwise (`repeats_exactly`), the
    newest state alone is compared, and but for roundings.

    The newest state is more than its alpha: the round, what the method and the server's
    optimiser remember, and what is kept of the clients' optimisers.

    Raises:
        ValueError: The log or the state is damaged.
    """
    machine = machine_of(snapshot)
    document = json.loads(snapshot.record.document)
    document.pop("counters", None)
    stored = decode(document, snapshot.record.arrays)
    state, memories = machine.start(), dict[int, Memory]()
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
        state = machine.with_plan(state, stored.planned)  # The round under way may have another.
        if not machine.repeats_exactly:
            state = _unless_close(state, stored)
            memories = kept if _are_close(_flat(kept), _flat(memories)) else memories
        for what, theirs, ours in (
            ("the cap", str(stored.account.cap), str(state.account.cap)),
            ("the number of rounds", str(stored.round), str(state.round)),
            ("alpha", alpha_sha256(stored.method.alpha), alpha_sha256(state.method.alpha)),
            ("the method's memory", _sha256(stored.method.memory), _sha256(state.method.memory)),
            ("the server's memory", _sha256(stored.server_memory), _sha256(state.server_memory)),
            ("the defences' memory", _sha256(stored.defence), _sha256(state.defence)),
            ("the clients' memory", _sha256(_flat(kept)), _sha256(_flat(memories))),
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


def _flat(memories: Mapping[int, Memory]) -> Memory:
    return {
        f"{client}/{name}": values
        for client, memory in memories.items()
        for name, values in memory.items()
    }


def _unless_close(state: RunState, stored: RunState) -> RunState:
    """A replayed state with the stored arrays where they are the same but for roundings."""
    ours, theirs = state.method, stored.method
    if _are_close({"alpha": theirs.alpha}, {"alpha": ours.alpha}):
        ours = ours.evolve(alpha=theirs.alpha)
    if _are_close(theirs.memory, ours.memory):
        ours = ours.evolve(memory=theirs.memory)
    if _are_close(stored.server_memory, state.server_memory):
        state = replace(state, server_memory=stored.server_memory)
    return replace(state, method=ours)


def _are_close(some: Memory, others: Memory) -> bool:
    """Whether two memories are the same but for roundings."""
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
