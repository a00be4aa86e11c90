"""The HTTP face of the service: parse, call, answer. Nothing is decided here."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from aiohttp import web
from pydantic import TypeAdapter

from fedone_sdk.aggregator.events import Effect, RoundFinished, RunEnded
from fedone_sdk.aggregator.http import (
    RETRY_AFTER_S,
    Handler,
    answer,
    bearer_token,
    problems,
    read,
)
from fedone_sdk.aggregator.openapi import openapi_document
from fedone_sdk.aggregator.run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.errors import BackendError, DataError, ProblemError, SpecError
from fedone_sdk.messages import (
    UPDATE,
    Claim,
    Decline,
    Enrol,
    Message,
    Score,
    VocabularyList,
)
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.vocabulary import ListVocabulary, build_vocabulary

__all__ = ["MAX_BODY_BYTES", "build_app"]

_log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Largest request body; an alpha of 2^22 float32 in base64 is 22 MiB."""

_SERVICE: web.AppKey[Service] = web.AppKey("service", Service)

_JSON: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

T = TypeVar("T")


@dataclass(slots=True)
class _Exchange:
    """A request's place in the report of traffic: its run, and the size of its body."""

    run: ServedRun | None = None
    upload: int = 0


_EXCHANGE: ContextVar[_Exchange] = ContextVar("exchange")


def build_app(service: Service) -> web.Application:
    """The aiohttp application over a service."""
    app = web.Application(middlewares=[_traffic, problems], client_max_size=MAX_BODY_BYTES)
    app[_SERVICE] = service
    app.router.add_routes(
        [
            web.post("/v1/clients", _enrol),
            web.post("/v1/assignments/claim", _claim),
            web.post("/v1/assignments/{assignment_id}/update", _update),
            web.post("/v1/assignments/{assignment_id}/renew", _renew),
            web.post("/v1/assignments/{assignment_id}/decline", _decline),
            web.post("/v1/score", _score),
            web.get("/v1/runs/{run_id}/task", _task),
            web.get("/v1/runs/{run_id}/vocabulary", _vocabulary),
            web.post("/v1/runs", _add_run),
            web.get("/v1/runs", _runs),
            web.get("/v1/runs/{run_id}", _run),
            web.get("/v1/runs/{run_id}/prompt", _prompt),
            web.get("/v1/runs/{run_id}/log", _run_log),
            web.get("/v1/runs/{run_id}/events", _events),
            web.post("/v1/runs/{run_id}/stop", _stop),
            web.post("/v1/runs/{run_id}/resume", _resume),
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/openapi.json", _openapi),
        ]
    )
    return app


@web.middleware
async def _traffic(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the bodies of federated messages for the report of the run they belong to."""
    exchange = _Exchange()
    _EXCHANGE.set(exchange)
    response = await handler(request)
    if exchange.run is not None and isinstance(response, web.Response):
        download = len(response.body) if isinstance(response.body, bytes) else 0
        exchange.run.count(exchange.upload, download, gateway=request.path == "/v1/score")
    return response


def _service(request: web.Request) -> Service:
    return request.app[_SERVICE]


async def _read(request: web.Request, parse: Callable[[bytes], T]) -> tuple[T, bytes]:
    def counted(body: bytes) -> T:
        _EXCHANGE.get().upload = len(body)
        return parse(body)

    return await read(request, counted)


def _admin(request: web.Request) -> Service:
    service = _service(request)
    service.authority.check_admin(bearer_token(request))
    return service


def _reader(request: web.Request) -> Service:
    """Runs may be read by people and by the clients that work for them."""
    service = _service(request)
    if not service.authority.is_admin(bearer_token(request)):
        service.client(bearer_token(request))
    return service


def _run_of(request: web.Request, service: Service) -> ServedRun:
    return service.run(request.match_info["run_id"])


# Devices


async def _enrol(request: web.Request) -> web.Response:
    service = _service(request)
    _EXCHANGE.get().run = service.traffic_run()
    service.authority.check_enrolment(bearer_token(request))
    message, _ = await _read(request, Enrol.model_validate_json)
    return answer(await service.enrol(bearer_token(request), message), status=201)


async def _claim(request: web.Request) -> web.Response:
    service = _service(request)
    client = service.client(bearer_token(request))
    message, _ = await _read(request, Claim.model_validate_json)
    _EXCHANGE.get().run = service.traffic_run(run_id=message.run_id)
    assignment = await service.claim(client, message)
    if assignment is None:
        return web.Response(status=204, headers={"Retry-After": str(RETRY_AFTER_S)})
    _EXCHANGE.get().run = service.traffic_run(run_id=assignment.run_id)
    return answer(assignment)


async def _update(request: web.Request) -> web.Response:
    service = _service(request)
    client = service.client(bearer_token(request))
    assignment_id = request.match_info["assignment_id"]
    _EXCHANGE.get().run = service.traffic_run(assignment_id=assignment_id)
    message, body = await _read(request, UPDATE.validate_json)
    body_sha256 = hashlib.sha256(body).hexdigest()
    return answer(await service.update(client, assignment_id, message, body_sha256))


async def _renew(request: web.Request) -> web.Response:
    service = _service(request)
    client = service.client(bearer_token(request))
    assignment_id = request.match_info["assignment_id"]
    _EXCHANGE.get().run = service.traffic_run(assignment_id=assignment_id)
    return answer(await service.renew(client, assignment_id))


async def _decline(request: web.Request) -> web.Response:
    service = _service(request)
    client = service.client(bearer_token(request))
    assignment_id = request.match_info["assignment_id"]
    _EXCHANGE.get().run = service.traffic_run(assignment_id=assignment_id)
    message, _ = await _read(request, Decline.model_validate_json)
    await service.decline(client, assignment_id, message)
    return web.Response(status=204)


async def _score(request: web.Request) -> web.Response:
    service = _service(request)
    client = service.client(bearer_token(request))
    message, body = await _read(request, Score.model_validate_json)
    _EXCHANGE.get().run = service.traffic_run(assignment_id=message.assignment_id)
    return answer(await service.score(client, message, hashlib.sha256(body).hexdigest()))


async def _task(request: web.Request) -> web.Response:
    run = _EXCHANGE.get().run = _run_of(request, _reader(request))
    return answer(run.task)


async def _vocabulary(request: web.Request) -> web.Response:
    run = _EXCHANGE.get().run = _run_of(request, _reader(request))
    return answer(VocabularyList(candidates=run.vocabulary.candidates))


# People


async def _add_run(request: web.Request) -> web.Response:
    service = _admin(request)
    document, _ = await _read(request, _JSON.validate_json)
    try:
        spec = validate_spec(RunSpec, document, source="run")
        if spec.data is not None:
            raise SpecError("data: clients bring their own; leave it out", source="run")
        if not isinstance(spec.prompt.vocabulary, ListVocabulary):
            # A path in a posted run would read the server's files for a stranger.
            raise SpecError("prompt.vocabulary.kind: must be list in a posted run", source="run")
        if spec.backend != RunSpec.model_fields["backend"].default:
            raise SpecError("backend: is the server's; leave it out", source="run")
        if spec.name in service.runs:
            raise ProblemError("run_conflict", f"there is a run {spec.name!r} already")
        run = await service.add_run(spec, build_vocabulary(spec.prompt.vocabulary, ()))
    except (SpecError, DataError, BackendError) as exc:
        raise ProblemError("invalid_run", str(exc)) from exc
    response = answer(run.result(), status=201)
    response.headers["Location"] = f"/v1/runs/{run.run_id}"
    return response


async def _runs(request: web.Request) -> web.Response:
    service = _reader(request)
    return web.json_response(
        [
            {"run_id": run.run_id, "status": run.state.status, "round": run.state.round}
            for run in service.runs.values()
        ]
    )


async def _run(request: web.Request) -> web.Response:
    return answer(_run_of(request, _reader(request)).result())


async def _prompt(request: web.Request) -> web.Response:
    return answer(_run_of(request, _reader(request)).prompt())


async def _run_log(request: web.Request) -> web.Response:
    service = _admin(request)
    entries = await service.log(_run_of(request, service))
    lines = [json.dumps({"kind": entry.kind, **json.loads(entry.body)}) for entry in entries]
    return web.Response(
        text="".join(f"{line}\n" for line in lines), content_type="application/jsonl"
    )


async def _events(request: web.Request) -> web.StreamResponse:
    """Server-sent events: one ``round`` per finished round, ``end`` with the result."""
    service = _reader(request)
    run = _run_of(request, service)
    queue: asyncio.Queue[Effect] = asyncio.Queue()

    def listen(source: ServedRun, effect: Effect) -> None:
        if source is run and isinstance(effect, (RoundFinished, RunEnded)):
            queue.put_nowait(effect)

    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    service.listeners.append(listen)
    try:
        await response.prepare(request)
        sent = 0
        while True:
            for report in run.history[sent:]:
                await _event(response, "round", report)
                sent += 1
            if sent < len(run.history):
                continue
            if not run.state.running:
                await _event(response, "end", run.result())
                return response
            try:
                async with asyncio.timeout(15):
                    await queue.get()
            except TimeoutError:
                # A comment keeps proxies from closing a quiet stream.
                await response.write(b": still here\n\n")
    finally:
        service.listeners.remove(listen)


async def _event(response: web.StreamResponse, name: str, message: Message) -> None:
    await response.write(f"event: {name}\ndata: {message.model_dump_json()}\n\n".encode())


async def _stop(request: web.Request) -> web.Response:
    service = _admin(request)
    run = _run_of(request, service)
    await service.stop_run(run)
    return answer(run.result())


async def _resume(request: web.Request) -> web.Response:
    service = _admin(request)
    run = _run_of(request, service)
    await service.resume_run(run)
    return answer(run.result())


# Machines


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    try:
        await _service(request).ready()
    except Exception:
        _log.exception("not ready")
        return web.json_response({"status": "the store cannot be used"}, status=503)
    return web.json_response({"status": "ok"})


async def _openapi(request: web.Request) -> web.Response:
    return web.json_response(openapi_document())
