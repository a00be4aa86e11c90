"""The clients of a federation in one process: their transport, identities and work."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedone_sdk import messages
from fedone_sdk.aggregator import Change, RetryLater, ServedRun, Service
from fedone_sdk.client import EdgeClient, Hooks, Idle, Network, Transport, WorkPolicy
from fedone_sdk.client.state import DeviceState, Identity
from fedone_sdk.client.transport import Call
from fedone_sdk.errors import DataError, ProblemError, system_errors
from fedone_sdk.files import replace_file
from fedone_sdk.stores import ClientRecord
from fedone_sdk.task import Example, ScoreFunction, TaskSpec

Between = Callable[[int, Transport], Transport]
"""Wraps a client's transport; called with the client's number and the transport."""

_SERVER = "simulation"
"""The aggregator's name in the clients' state files; always the same, so that runs can resume."""

_SECRET = "enrolment-secret"
"""Name of the file with the population's secret."""

_BATCH = 128
"""Number of concurrent enrolments."""


def population_secret(state_dir: Path | None) -> bytes:
    """Return the secret, stored in `state_dir`, that the clients' token and nonces come from."""
    if state_dir is None:
        return secrets.token_bytes(32)
    file = state_dir / _SECRET
    with system_errors(DataError, f"{state_dir}: cannot be used as a state folder"):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists() or not file.read_bytes():
            replace_file(file, secrets.token_bytes(32), mode=0o600)
        return file.read_bytes()


def enrolment_token(secret: bytes) -> str:
    """Return the clients' enrolment token."""
    return hashlib.sha256(secret + b"token").hexdigest()


class MemoryTransport(Transport):
    """Calls a service in the same process, and counts the bytes of messages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def send(self, call: Call) -> bytes | Idle:
        """Call the service."""
        body, client = call.body, None
        if call.name != "enrol":
            client = await self._service.access.authenticate(call.secret)
        run = self._run(call, client)
        try:
            answer = await self._serve(call, client, body)
        except ProblemError as exc:
            self._count(call, run, body, messages.encode(messages.Problem.of(exc)))
            raise
        if isinstance(answer, RetryLater):
            self._count(call, run, body, b"")
            return Idle(retry_after_s=answer.retry_after_s)
        if isinstance(answer, messages.AlphaAssignment | messages.LossesAssignment):
            run = self._service.work.traffic_run(run_id=answer.run_id)
        content = answer if isinstance(answer, bytes) else messages.encode(answer)
        self._count(call, run, body, content)
        return content

    def _run(self, call: Call, client: ClientRecord | None) -> ServedRun | None:
        message, assignment_id = call.message, call.of
        if isinstance(message, messages.Claim):
            return self._service.work.traffic_run(run_id=message.run_id)
        if call.name in ("task", "vocabulary"):
            return self._service.work.traffic_run(run_id=call.of)
        if isinstance(message, messages.Score | messages.Reflect):
            assignment_id = message.assignment_id
        work = None if client is None or not assignment_id else (client, assignment_id)
        return self._service.work.traffic_run(work=work)

    def _count(self, call: Call, run: ServedRun | None, sent: bytes, answer: bytes) -> None:
        if run is not None and call.name != "runs":
            run.count_traffic(len(sent), len(answer), gateway=call.name in ("score", "reflect"))

    async def _serve(
        self, call: Call, client: ClientRecord | None, body: bytes
    ) -> messages.Message | RetryLater | bytes:
        service, message = self._service, call.message
        if isinstance(message, messages.Enrol):
            return await service.access.enrol(call.secret, message)
        assert client is not None
        digest = hashlib.sha256(body).hexdigest()
        match message:
            case messages.Claim():
                return await service.work.claim(client, message)
            case messages.Score():
                score = messages.Score.model_validate_json(body)
                return await service.work.score(client, score, digest)
            case messages.Reflect():
                reflect = messages.Reflect.model_validate_json(body)
                return await service.work.reflect(client, reflect)
            case messages.Decline():
                await service.work.decline(client, call.of, message)
                return b""
        match call.name:
            case "rotate":
                return await service.access.rotate(client, call.secret)
            case "update":
                update = messages.UPDATE.validate_json(body)
                return await service.work.update(client, call.of, update, digest)
            case "renew":
                return await service.work.renew(client, call.of)
            case "runs":
                entries = service.registry.runs_for(client)
                return json.dumps([entry.model_dump() for entry in entries]).encode()
        run = await service.registry.run_for(client, call.of)
        return run.task if call.name == "task" else run.vocabulary_list(call.after)


@dataclass(slots=True)
class _Member:
    number: int  # The index of its shard.
    nonce: str
    index: int | None = None  # The enrolment index.
    enrolled: messages.Enrolled | None = None  # Answer that its `client` gets when it enrols.
    client: EdgeClient | None = None
    awake: bool = False  # Whether its `EdgeClient` is at work.


class _MemberTransport(MemoryTransport):
    def __init__(self, population: Population, member: _Member) -> None:
        super().__init__(population.service)
        self._population = population
        self._member = member

    async def enrol(self, token: str, message: messages.Enrol) -> messages.Enrolled:
        answer, self._member.enrolled = self._member.enrolled, None
        if answer is None:
            answer = await super().enrol(token, message)
            await self._population.record_identity(self._member, answer.credential)
        return answer


@dataclass(kw_only=True, eq=False)
class Population:
    """The clients of a federation, one per shard (the rows of one client).

    All clients are enrolled and wait in the aggregator's pool, without an open request. When the
    server offers a client a seat (a place in a round), an `EdgeClient` is created for the client.
    It claims, scores and sends an update, as on a device. The `EdgeClient` is kept for later seats.

    Attributes:
        secret: With the same secret, a client enrols again as the same client.
        state_dir: Contains one state folder per client; None keeps state in memory.
    """

    service: Service
    shards: Sequence[Sequence[Example]]
    task: TaskSpec
    secret: bytes = field(repr=False)
    score: ScoreFunction | None = None
    state_dir: Path | None = None
    between: Between | None = None

    def __post_init__(self) -> None:
        self._members = [_Member(number, self._nonce(number)) for number in range(len(self.shards))]
        self._by_index: dict[int, _Member] = {}
        self._created = AsyncExitStack()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _nonce(self, number: int) -> str:
        digest = hashlib.sha256(self.secret + b"%d" % number).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._created.aclose()

    async def enrol(self) -> None:
        """Enrol all clients, in shard order: a client's draws depend on its enrolment index."""
        if self.between is not None:
            for member in self._members:
                await (await self._client(member)).enrol()
            return
        for at in range(0, len(self._members), _BATCH):
            members = self._members[at : at + _BATCH]
            # The store's queue keeps the order, and writes the batch in one transaction.
            await asyncio.gather(*map(self._enrol, members))
            for member in members:
                if member.enrolled is not None:
                    await self.record_identity(member, member.enrolled.credential)

    async def _enrol(self, member: _Member) -> None:
        with suppress(ProblemError):  # A revoked client gets no work.
            member.enrolled = await MemoryTransport(self.service).enrol(
                enrolment_token(self.secret), messages.Enrol(nonce=member.nonce)
            )

    async def record_identity(self, member: _Member, credential: str) -> None:
        """Store a client's enrolment index."""
        record = await self.service.access.authenticate(credential)
        member.index = record.index
        self._by_index[record.index] = member

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the clients within the ``async with``."""
        async with asyncio.TaskGroup() as self._group:
            self.service.listeners.append(self._on_change)
            waiting = {
                index: len(self.shards[member.number]) for index, member in self._by_index.items()
            }
            keeping = self._group.create_task(
                self.service.dispatcher.keep_waiting(waiting), name="population"
            )
            try:
                for run in self.service.runs.values():
                    self._wake_seated(run)  # Clients may have had seats before a restart.
                yield
            finally:
                self.service.listeners.remove(self._on_change)
                for task in (keeping, *self._tasks):
                    task.cancel()

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
        member = self._by_index.get(index)  # None for a client of another process.
        if member is not None and not member.awake and self._group is not None:
            member.awake = True
            task = self._group.create_task(self._work(member), name=f"client {member.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, member: _Member) -> None:
        client = await self._client(member)
        while True:
            turn = await client.run_once()
            has_seat = any(
                seat.client == member.index and seat.phase != "done"
                for run in self.service.runs.values()
                for seat in run.state.seats
            )
            if turn.outcome == "ended" or (turn.outcome != "offline" and not has_seat):
                # No offer can be missed, because there is no await after the check.
                member.awake = False
                return
            await asyncio.sleep(turn.next_turn_s)

    async def _client(self, member: _Member) -> EdgeClient:
        if member.client is None:
            member.client = await self._created.enter_async_context(self.create_client(member))
        return member.client

    def create_client(self, member: _Member) -> EdgeClient:
        """Create the edge client of a shard."""
        number, folder = member.number, None
        if self.state_dir is not None:
            folder = self.state_dir / str(number)
            with closing(DeviceState(folder, _SERVER)) as state:
                state.identity = Identity(nonce=member.nonce)
        transport: Transport = _MemberTransport(self, member)
        if self.between is not None:
            transport = self.between(number, transport)
        return EdgeClient(
            _SERVER,
            token=enrolment_token(self.secret),
            data=self.shards[number],
            label=self.task.label_field,
            fields=(*self.task.fields, self.task.label_field),
            state_dir=folder,
            hooks=Hooks(score=self.score),
            policy=WorkPolicy(reflect="gateway"),  # The user's rows may be sent to the gateway.
            network=Network(transport=transport),
        )
