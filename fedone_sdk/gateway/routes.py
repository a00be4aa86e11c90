"""The HTTP face of the gateway: parse, call, answer. Nothing is decided here."""

from __future__ import annotations

import json
import time
import traceback

import structlog
from aiohttp import web

from fedone_sdk.aggregator.http import Handler, answer, bearer_token, problem, problems, read
from fedone_sdk.errors import ProblemError
from fedone_sdk.gateway.service import ModelGateway, Refusal
from fedone_sdk.messages import LabelWords, ModelQuery

__all__ = ["MAX_BODY_BYTES", "build_app"]

_log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Largest request body."""

_GATEWAY: web.AppKey[ModelGateway] = web.AppKey("gateway", ModelGateway)


def build_app(gateway: ModelGateway) -> web.Application:
    """The aiohttp application over a gateway."""
    app = web.Application(middlewares=[problems, _refusals], client_max_size=MAX_BODY_BYTES)
    app[_GATEWAY] = gateway
    app.router.add_routes(
        [
            web.get("/v1/model", _model),
            web.post("/v1/model/check", _check),
            web.post("/v1/model/quote", _quote),
            web.post("/v1/model/score", _score),
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
        ]
    )
    return app


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The refusals that say more than others."""
    try:
        return await handler(request)
    except Refusal as exc:
        return problem(exc, exc.document)


def _gateway(request: web.Request) -> ModelGateway:
    return request.app[_GATEWAY]


def _caller(request: web.Request) -> str:
    return _gateway(request).caller(bearer_token(request), request.path)


async def _model(request: web.Request) -> web.Response:
    _caller(request)
    return answer(await _gateway(request).check(()))


async def _check(request: web.Request) -> web.Response:
    _caller(request)
    message, _ = await read(request, LabelWords.model_validate_json)
    return answer(await _gateway(request).check(message.label_words, message.form))


async def _quote(request: web.Request) -> web.Response:
    _caller(request)
    message, _ = await read(request, ModelQuery.model_validate_json)
    usage = await _gateway(request).quote(message)
    return web.Response(body=json.dumps(usage.exact()).encode(), content_type="application/json")


async def _score(request: web.Request) -> web.Response:
    started = time.monotonic()
    caller = _caller(request)
    message, _ = await read(request, ModelQuery.model_validate_json)
    log = _log.bind(caller=caller, want=message.want, inputs=len(message.inputs))
    try:
        found = await _gateway(request).score(caller, message)
    except ProblemError as exc:
        usage = exc.document.usage if isinstance(exc, Refusal) else None
        log.warning(
            "refused",
            code=exc.code,
            detail=exc.whole if isinstance(exc, Refusal) else exc.detail,
            **({} if usage is None else {"usage": usage.exact()}),
        )
        raise
    log.info(
        "answered",
        cached=found.cached,
        usage=found.usage.exact(),
        wall_s=round(time.monotonic() - started, 6),
    )
    return answer(found)


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    try:
        await _gateway(request).ready()
    except Exception:
        _log.error("not ready", traceback=traceback.format_exc())
        return web.json_response({"status": "the ledger cannot be used"}, status=503)
    return web.json_response({"status": "ok"})
