"""A transport without sockets: encoded messages go directly to the service."""

from __future__ import annotations

import hashlib
import json

from fedone_sdk.aggregator.access.tokens import may_see
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.client import Idle, Transport
from fedone_sdk.client.transport import Call
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    UPDATE,
    AlphaAssignment,
    Claim,
    Decline,
    Enrol,
    LossesAssignment,
    Message,
    Problem,
    Reflect,
    Score,
    encode,
)
from fedone_sdk.stores import ClientRecord


class MemoryTransport(Transport):
    """Calls a service in the same process, and counts the bytes of the bodies."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def send(self, call: Call) -> bytes | Idle:
        """Call the service."""
        body, client = call.body, None
        if call.name != "enrol":
            client = await self._service.access.client(call.secret)
        run = self._run(call, client)
        try:
            answer = await self._called(call, client, body)
        except ProblemError as exc:
            self._count(call, run, body, encode(Problem.of(exc)))
            raise
        if isinstance(answer, RetryLater):
            self._count(call, run, body, b"")
            return Idle(retry_after_s=answer.retry_after_s)
        if isinstance(answer, AlphaAssignment | LossesAssignment):
            run = self._service.work.traffic_run(run_id=answer.run_id)
        content = answer if isinstance(answer, bytes) else encode(answer)
        self._count(call, run, body, content)
        return content

    def _run(self, call: Call, client: ClientRecord | None) -> ServedRun | None:
        """Return the run whose traffic includes a call."""
        message = call.message
        if isinstance(message, Claim):
            return self._service.work.traffic_run(run_id=message.run_id)
        if call.name in ("task", "vocabulary"):
            return self._service.work.traffic_run(run_id=call.of)
        assignment_id = message.assignment_id if isinstance(message, Score | Reflect) else call.of
        work = None if client is None or not assignment_id else (client, assignment_id)
        return self._service.work.traffic_run(work=work)

    def _count(self, call: Call, run: ServedRun | None, sent: bytes, answer: bytes) -> None:
        if run is not None and call.name != "runs":
            run.count_traffic(len(sent), len(answer), gateway=call.name in ("score", "reflect"))

    async def _called(
        self, call: Call, client: ClientRecord | None, body: bytes
    ) -> Message | RetryLater | bytes:
        service, message = self._service, call.message
        if isinstance(message, Enrol):
            return await service.access.enrol(call.secret, message)
        assert client is not None
        digest = hashlib.sha256(body).hexdigest()
        match message:
            case Claim():
                return await service.work.claim(client, message)
            case Score():
                parsed = Score.model_validate_json(body)
                return await service.work.score(client, parsed, digest)
            case Reflect():
                return await service.work.reflect(client, Reflect.model_validate_json(body))
            case Decline():
                await service.work.decline(client, call.of, message)
                return b""
        match call.name:
            case "rotate":
                return await service.access.rotate(client, call.secret)
            case "update":
                update = UPDATE.validate_json(body)
                return await service.work.update(client, call.of, update, digest)
            case "renew":
                return await service.work.renew(client, call.of)
            case "runs":
                known = [one.entry for one in service.registry.summaries]
                seen = [one.model_dump() for one in known if may_see(client.runs, one.run_id)]
                return json.dumps(seen).encode()
        run = await service.registry.run_for(client, call.of)
        return run.task if call.name == "task" else run.vocabulary_list(call.after)
