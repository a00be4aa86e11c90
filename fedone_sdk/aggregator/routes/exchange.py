"""What the handlers share: who asks, for which run, and what is there to answer with."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from structlog.contextvars import bind_contextvars

from fedone_sdk.aggregator.access.tokens import ROLES, AdminToken, may_see
from fedone_sdk.aggregator.http.drain import Drain
from fedone_sdk.aggregator.http.limits import LIMITER
from fedone_sdk.aggregator.http.requests import bearer_token, body_of, read, signed_request
from fedone_sdk.aggregator.routes.health import Readiness
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import JSON, TENSORS, Parse, has_arrays
from fedone_sdk.stores import ClientRecord

if TYPE_CHECKING:
    from fedone_sdk.aggregator.telemetry.metrics import Metrics

__all__ = [
    "DOCUMENT",
    "DRAIN",
    "EXCHANGE",
    "Exchange",
    "METRICS",
    "READINESS",
    "SERVICE",
    "admit",
    "client_of",
    "message_of",
    "run_of",
]

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)
METRICS: web.AppKey[Metrics | None] = web.AppKey("metrics")
DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("document", dict)

T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """What is known of the request under way, for its log line, the metrics and the report.

    Attributes:
        request_id: Names the request in the log; sent back to the caller.
        route: What was asked for; None where there is no such route.
        run: The run that it belongs to.
        round: The round of that run, when it came.
        client: The device that sent it.
        person: The person who sent it.
        upload: Size of its body, bytes.
        problem: Code of its refusal.
        status: HTTP status of its answer, once there is one.
    """

    request_id: str
    route: Route | None = None
    run: ServedRun | None = None
    round: int = 0
    client: ClientRecord | None = None
    person: AdminToken | None = None
    upload: int = 0
    problem: str | None = None
    status: int | None = None

    def sent_by(self, client: ClientRecord) -> None:
        """Notes which device sent it, for the log lines that follow."""
        self.client = client
        bind_contextvars(client_id=client.client_id)

    def may_see(self, run_id: str) -> bool:
        """Whether a run is there for who sent the request."""
        asker = self.client or self.person
        return asker is not None and may_see(asker.runs, run_id)

    def concerns(self, run: ServedRun | None) -> None:
        """Notes which run it belongs to, for the log lines that follow."""
        self.run, self.round = run, 0 if run is None else run.state.round
        self.bind()

    def bind(self) -> None:
        """Has the log lines that follow in this task say which run it belongs to."""
        if self.run is not None:
            bind_contextvars(run_id=self.run.run_id, round=self.round)


EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")


async def admit(request: web.Request, route: Route) -> None:
    """Lets a request through to its handler.

    Raises:
        ProblemError: ``unauthorized``, ``forbidden``, ``rate_limited``, what is wrong with a
            signature, or ``store_unavailable`` for a device while the service is starting.
    """
    service, token, exchange = request.app[SERVICE], bearer_token(request), EXCHANGE.get()
    access = service.access
    if route.access == "enrolment":
        await access.check_token(token)
    elif route.access in ROLES:
        exchange.person = access.authority.check(token, route.access)
    elif route.access == "member":
        exchange.person = access.authority.person(token)
    if route.access == "device" or (route.access == "member" and exchange.person is None):
        client = await access.client(token)
        exchange.sent_by(client)
        request.app[LIMITER].client(client.index)
        if access.signs(client):
            signed = await signed_request(request, max_bytes=route.max_body)
            await access.check_signature(client, signed)
        await service.wait_until_open()


def client_of(request: web.Request) -> ClientRecord:
    """The device that was admitted."""
    client = EXCHANGE.get().client
    if client is None:
        raise LookupError(f"{request.path} admits more than devices")
    return client


async def run_of(request: web.Request) -> ServedRun:
    """The run that the path names.

    Raises:
        ProblemError: ``not_found``: there is none, or the caller may not see it.
    """
    service, exchange, run_id = request.app[SERVICE], EXCHANGE.get(), request.match_info["run_id"]
    if not exchange.may_see(run_id):
        raise ProblemError("not_found", f"there is no run {run_id!r}")
    run = await service.run(run_id)
    exchange.concerns(run)
    return run


async def message_of(request: web.Request, parse: Parse[T]) -> tuple[T, bytes]:
    """The message in the body, and the body.

    What carries arrays may come as a file of tensors too.

    Raises:
        ProblemError: ``not_json``, ``invalid_message`` or ``body_too_large``; ``unauthorized``
            for a device that was revoked meanwhile.
    """
    exchange = EXCHANGE.get()
    route = exchange.route
    limit = None if route is None else route.max_body
    forms = (JSON, TENSORS) if route is not None and has_arrays(route.request) else (JSON,)
    if request.content_type in forms:
        exchange.upload = len(await body_of(request, max_bytes=limit))
    found = await read(request, parse, max_bytes=limit, forms=forms)
    if exchange.client is not None:
        await request.app[SERVICE].access.check_still(exchange.client)
    return found
