"""A transport without sockets: encoded messages go directly to the service."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from fedone_sdk.aggregator.access.tokens import may_see
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.serving.client_pool import RetryLater
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.client import Idle
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    ASSIGNMENT,
    UPDATE,
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Decline,
    Enrol,
    Enrolled,
    LossesAssignment,
    LossesUpdate,
    Message,
    Problem,
    Receipt,
    Reflect,
    Reflected,
    Renewal,
    Rotated,
    RunEntry,
    RunTask,
    Score,
    Scores,
    VocabularyList,
    encode,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_NOTHING = b""


class MemoryTransport:
    """Calls a service in the same process, and counts the bytes of the bodies."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Enrol a client."""
        run = self._service.traffic_run()
        return await self._exchange(
            run, encode(message), self._service.access.enrol(token, message)
        )

    async def rotate(self, credential: str) -> Rotated:
        """Rotate the credential."""
        client = await self._service.access.client(credential)
        answer = await self._service.access.rotate(client, credential)
        return await self._exchange(self._service.traffic_run(), _NOTHING, _ready(answer))

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        """Claim an assignment."""
        client = await self._service.access.client(credential)
        claimed = await self._service.claim(client, message)
        if isinstance(claimed, RetryLater):
            _count(self._service.traffic_run(run_id=message.run_id), encode(message), _NOTHING)
            return Idle(retry_after_s=claimed.retry_after_s)
        answer = encode(claimed)
        _count(self._service.traffic_run(run_id=claimed.run_id), encode(message), answer)
        return ASSIGNMENT.validate_json(answer)

    async def runs(self, credential: str) -> Sequence[RunEntry]:
        """List the runs that the client may work for."""
        client = await self._service.access.client(credential)
        known = self._service.registry.summaries
        return [one.entry for one in known if may_see(client.runs, one.run_id)]

    async def task(self, credential: str, run_id: str) -> RunTask:
        """Fetch a run's task."""
        run = await self._service.run_for(await self._service.access.client(credential), run_id)
        return await self._exchange(run, _NOTHING, _ready(run.task))

    async def vocabulary(self, credential: str, run_id: str, after: int = 0) -> VocabularyList:
        """Fetch a run's candidates; with `after`, those added since that version."""
        run = await self._service.run_for(await self._service.access.client(credential), run_id)
        return await self._exchange(run, _NOTHING, _ready(run.vocabulary_list(after)))

    async def score(self, credential: str, message: Score) -> Scores:
        """Score through the gateway."""
        body = encode(message)
        call = self._service.work.score(
            await self._service.access.client(credential),
            Score.model_validate_json(body),
            hashlib.sha256(body).hexdigest(),
        )
        run = self._service.traffic_run(assignment_id=message.assignment_id)
        return await self._exchange(run, body, call, gateway=True)

    async def reflect(self, credential: str, message: Reflect) -> Reflected:
        """Let the run's model write a candidate."""
        body = encode(message)
        client = await self._service.access.client(credential)
        call = self._service.work.reflect(client, Reflect.model_validate_json(body))
        run = self._service.traffic_run(assignment_id=message.assignment_id)
        return await self._exchange(run, body, call, gateway=True)

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        """Send an update."""
        body = encode(message)
        run = self._service.traffic_run(assignment_id=assignment_id)
        call = self._service.work.update(
            await self._service.access.client(credential),
            assignment_id,
            UPDATE.validate_json(body),
            hashlib.sha256(body).hexdigest(),
        )
        return await self._exchange(run, body, call)

    async def renew(self, credential: str, assignment_id: str) -> Renewal:
        """Renew an assignment's lease."""
        run = self._service.traffic_run(assignment_id=assignment_id)
        call = self._service.work.renew(
            await self._service.access.client(credential), assignment_id
        )
        return await self._exchange(run, _NOTHING, call)

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        """Decline an assignment."""
        run = self._service.traffic_run(assignment_id=assignment_id)
        client = await self._service.access.client(credential)
        await self._service.work.decline(client, assignment_id, message)
        _count(run, encode(message), _NOTHING)

    async def aclose(self) -> None:
        """Do nothing: the service belongs to the caller."""

    @staticmethod
    async def _exchange(
        run: ServedRun | None, sent: bytes, call: Awaitable[M], *, gateway: bool = False
    ) -> M:
        try:
            answer = await call
        except ProblemError as exc:
            _count(run, sent, encode(Problem.of(exc)), gateway=gateway)
            raise
        body = encode(answer)
        _count(run, sent, body, gateway=gateway)
        return type(answer).model_validate_json(body)


async def _ready(message: M) -> M:
    return message


def _count(run: ServedRun | None, sent: bytes, answer: bytes, *, gateway: bool = False) -> None:
    if run is not None:
        run.count_traffic(len(sent), len(answer), gateway=gateway)
