"""The clients of a federation in one process; a client object exists only once it has work."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedone_sdk.aggregator.dispatch.client_pool import MEMBER_TTL_S
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.client import EdgeClient, Hooks, Network, Transport, WorkPolicy
from fedone_sdk.client.state import DeviceState, Identity
from fedone_sdk.errors import DataError, ProblemError, system_errors
from fedone_sdk.files import replace_file
from fedone_sdk.local.memory_transport import MemoryTransport
from fedone_sdk.messages import Enrol, Enrolled
from fedone_sdk.task import Example, ScoreFunction, TaskSpec

Between = Callable[[int, Transport], Transport]
"""Wraps the transport of client number k; returns the transport that the client uses."""

_SERVER = "simulation"
"""The aggregator's name in the clients' state files: its URL changes at every start."""

_SECRET = "enrolment-secret"
"""The file with the secret that enrolment nonces derive from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The clients of a federation, one per shard.

    Attributes:
        task: The run's task, whose columns the clients let out.
        score: The user's function, for loss ``score``.
        state_dir: Holds one state folder per client; None keeps state in memory.
        between: Wraps each client's transport; None leaves it as it is.
        secret: The clients' token and nonces are made of it; with `state_dir`, it is kept there.
    """

    shards: Sequence[Sequence[Example]]
    task: TaskSpec
    score: ScoreFunction | None = None
    state_dir: Path | None = None
    between: Between | None = None
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        folder = self.state_dir
        if not self.secret:
            secret = secrets.token_bytes(32) if folder is None else _secret(folder)
            object.__setattr__(self, "secret", secret)

    @property
    def token(self) -> str:
        """The enrolment token; with `state_dir`, the same at every start."""
        return hashlib.sha256(self.secret + b"token").hexdigest()

    def __len__(self) -> int:
        return len(self.shards)

    def nonces(self) -> tuple[str, ...]:
        """Return each client's enrolment nonce; with `state_dir`, the same at every start.

        An enrolment with the same nonce returns the same client.
        """
        digests = (hashlib.sha256(self.secret + b"%d" % number) for number in range(len(self)))
        return tuple(
            base64.urlsafe_b64encode(found.digest()).decode().rstrip("=") for found in digests
        )

    def client(self, number: int, line: Transport, nonce: str) -> EdgeClient:
        """Create a client."""
        if self.state_dir is not None:
            with closing(DeviceState(self._folder(number), _SERVER)) as state:
                state.identity = Identity(nonce=nonce)
        return EdgeClient(
            _SERVER,
            token=self.token,
            data=self.shards[number],
            label=self.task.label_field,
            fields=(*self.task.fields, self.task.label_field),
            state_dir=self._folder(number),
            hooks=Hooks(score=self.score),
            policy=WorkPolicy(reflect="gateway"),  # All rows are the user's.
            network=Network(transport=line if self.between is None else self.between(number, line)),
        )

    def _folder(self, number: int) -> Path | None:
        return None if self.state_dir is None else self.state_dir / str(number)


def _secret(folder: Path) -> bytes:
    file = folder / _SECRET
    with system_errors(DataError, f"{folder}: cannot be used as a state folder"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists() or not file.read_bytes():
            replace_file(file, secrets.token_bytes(32), mode=0o600)
        return file.read_bytes()


_BATCH = 128
"""Concurrent enrolments."""


@dataclass(slots=True)
class _Member:
    number: int
    index: int | None = None
    enrolled: Enrolled | None = None
    client: EdgeClient | None = None
    awake: bool = False


class _MemberTransport(MemoryTransport):
    def __init__(self, population: Population, member: _Member) -> None:
        super().__init__(population.service)
        self._population = population
        self._member = member

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        answer, self._member.enrolled = self._member.enrolled, None
        if answer is None:
            answer = await super().enrol(token, message)
            await self._population.record_identity(self._member, answer.credential)
        return answer


class Population:
    """The clients of a federation, one per shard.

    All are enrolled and wait in the aggregator's pool, without an open request. When the machine
    offers one of them a seat, its `EdgeClient` is created and works as on a device: it claims the
    assignment, scores, and sends the update. It is kept for its next seat, with its run state and
    the memory of its method.
    """

    def __init__(self, service: Service, devices: Devices) -> None:
        self.service = service
        self._devices = devices
        self._members = [_Member(number) for number in range(len(devices))]
        self._nonces = devices.nonces()
        self._by_index: dict[int, _Member] = {}
        self._made = AsyncExitStack()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._made.aclose()

    async def enrol(self) -> None:
        """Enrol all clients, in the order of their shards."""
        devices = self._devices
        if devices.between is not None:
            for member in self._members:
                await (await self._client(member)).enrol()
            return
        for at in range(0, len(self._members), _BATCH):
            members = self._members[at : at + _BATCH]
            # The store's queue keeps their order, and writes them together.
            await asyncio.gather(*map(self._enrol, members))
            for member in members:
                if member.enrolled is not None:
                    await self.record_identity(member, member.enrolled.credential)

    async def _enrol(self, member: _Member) -> None:
        request = Enrol(nonce=self._nonces[member.number])
        with suppress(ProblemError):  # A client that was revoked gets no work.
            member.enrolled = await MemoryTransport(self.service).enrol(
                self._devices.token, request
            )

    async def record_identity(self, member: _Member, credential: str) -> None:
        """Record a client's identity."""
        record = await self.service.access.client(credential)
        member.index = record.index
        self._by_index[record.index] = member

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the clients within the ``async with``."""
        async with asyncio.TaskGroup() as self._group:
            self.service.listeners.append(self._on_change)
            keeping = self._group.create_task(self._renew_waiting(), name="population")
            try:
                await self._gather(self._by_index)
                for run in self.service.runs.values():
                    self._wake_seated(run)  # Seats from before a restart.
                yield
            finally:
                self.service.listeners.remove(self._on_change)
                for task in (keeping, *self._tasks):
                    task.cancel()

    # Working clients

    def _on_change(self, run: ServedRun, change: Change) -> None:
        for client in change.offered:
            self._offer(client)
        if change.reloaded:
            self._wake_seated(run)

    def _wake_seated(self, run: ServedRun) -> None:
        for seat in run.state.seats:
            if seat.phase != "done":
                self._offer(seat.client)

    def _offer(self, index: int) -> None:
        member = self._by_index.get(index)  # None for another process's client
        if member is not None and not member.awake and self._group is not None:
            member.awake = True
            task = self._group.create_task(self._work(member), name=f"client {member.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has_seat(self, member: _Member) -> bool:
        return any(
            seat.client == member.index and seat.phase != "done"
            for run in self.service.runs.values()
            for seat in run.state.seats
        )

    async def _work(self, member: _Member) -> None:
        client = await self._client(member)
        while True:
            turn = await client.run_once()
            idle = turn.outcome != "offline" and not self._has_seat(member)
            if turn.outcome == "ended" or idle:
                # No await between the check and here, so a new offer wakes the client again.
                member.awake = False
                return
            await asyncio.sleep(turn.next_turn_s)

    async def _client(self, member: _Member) -> EdgeClient:
        if member.client is None:
            line = _MemberTransport(self, member)
            client = self._devices.client(member.number, line, self._nonces[member.number])
            member.client = await self._made.enter_async_context(client)
        return member.client

    # Waiting clients

    async def _gather(self, indices: Iterable[int]) -> None:
        shards = self._devices.shards
        await self.service.dispatcher.enter_all(
            {index: len(shards[self._by_index[index].number]) for index in indices}
        )

    async def _renew_waiting(self) -> None:
        while True:
            await asyncio.sleep(MEMBER_TTL_S / 3)
            pool = self.service.dispatcher.pool
            # Not clients that left the pool, for example after a missed seat; a claim readmits.
            await self._gather([index for index in self._by_index if index in pool])
