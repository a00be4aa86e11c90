"""Routes for devices: enrolment, claims, updates, the gateway."""

from __future__ import annotations

import hashlib
import math
import re

from aiohttp import web

from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES, RouteTable
from fedone_sdk.aggregator.http.requests import (
    CONTEXT,
    PROBLEM,
    SERVICE,
    answer,
    bearer_token,
    client_of,
    message_of,
    query_number,
    raw_body,
    run_of,
)
from fedone_sdk.messages import (
    UPDATE,
    AlphaAssignment,
    Assignment,
    Claim,
    Decline,
    Enrol,
    Enrolled,
    Receipt,
    Reflect,
    Reflected,
    Renewal,
    Rotated,
    RunTask,
    Score,
    Scores,
    Tensor,
    Update,
    VocabularyList,
)

route = RouteTable("devices")

_BY_A_PROXY = re.compile(r": answered (4\d\d), and not as an aggregator does$")
"""The reason of a device whose request something between it and the server refused."""


@route("POST /v1/clients", "enrolment", {201: Enrolled}, request=Enrol, problems=("forbidden",))
async def enrol(request: web.Request) -> web.Response:
    """Enrol a device with an enrolment token.

    The response contains its credential, of which the server only stores a digest.
    """
    service = request.app[SERVICE]
    CONTEXT.get().set_run(service.work.traffic_run())
    message = await message_of(request, Enrol.model_validate)
    return answer(await service.access.enrol(bearer_token(request), message), status=201)


@route("POST /v1/clients/me/credential", "device", Rotated)
async def rotate(request: web.Request) -> web.Response:
    """Give a device a new credential.

    The current credential stays valid until the new one is used, so the request can be repeated if
    the response is lost.
    """
    client, access = client_of(request), request.app[SERVICE].access
    return answer(await access.rotate(client, bearer_token(request)))


@route(
    "POST /v1/assignments/claim",
    "device",
    {200: Assignment, 204: None},
    request=Claim,
    waits=True,
    headers={204: {"Retry-After": "Seconds after which to retry"}},
    problems=("forbidden", "not_found", "model_mismatch", "run_ended", "backend_unavailable"),
)
async def claim(request: web.Request) -> web.Response:
    """Claim work, waiting up to `wait_s` seconds.

    A repeated claim returns the same open assignment. 204 means that there is no work now.
    """
    service, client = request.app[SERVICE], client_of(request)
    message = await message_of(request, Claim.model_validate)
    concerned = service.work.traffic_run(run_id=message.run_id)
    if concerned is not None and CONTEXT.get().may_see(concerned.run_id):
        CONTEXT.get().set_run(concerned)
    work = await service.work.claim(client, message)
    if isinstance(work, RetryLater):
        # At least 1 s, so that clients do not poll in a tight loop.
        after_s = max(math.ceil(work.retry_after_s), 1)
        return web.Response(status=204, headers={"Retry-After": str(after_s)})
    CONTEXT.get().set_run(service.work.traffic_run(run_id=work.run_id))
    array = work.alpha if isinstance(work, AlphaAssignment) else work.prompts
    return await in_thread_if_large(_size(array), answer, work)


@route(
    "POST /v1/assignments/{assignment_id}/update",
    "device",
    Receipt,
    request=Update,
    max_body=MAX_BODY_BYTES,
    problems=("assignment_expired", "update_conflict", "model_mismatch", "run_conflict"),
)
async def update(request: web.Request) -> web.Response:
    """Send an update. The same body again gets the same receipt."""
    service, client = request.app[SERVICE], client_of(request)
    assignment_id = request.match_info["assignment_id"]
    await service.work.check_known(client, assignment_id)
    body = await raw_body(request)
    message = await message_of(request, UPDATE.validate_python, body)
    body_sha256 = await in_thread_if_large(len(body), _sha256, body)
    return answer(await service.work.update(client, assignment_id, message, body_sha256))


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@route(
    "POST /v1/assignments/{assignment_id}/renew",
    "device",
    Renewal,
    problems=("assignment_expired", "renewal_refused"),
)
async def renew(request: web.Request) -> web.Response:
    """Give a device a full new deadline."""
    service, client = request.app[SERVICE], client_of(request)
    assignment_id = request.match_info["assignment_id"]
    return answer(await service.work.renew(client, assignment_id))


def _size(array: Tensor | None) -> int:
    return 0 if array is None else 8 * math.prod(array.shape)


@route(
    "POST /v1/assignments/{assignment_id}/decline",
    "device",
    {204: None},
    request=Decline,
    problems=("assignment_expired", "run_conflict"),
)
async def decline(request: web.Request) -> web.Response:
    """Decline an assignment."""
    service, client = request.app[SERVICE], client_of(request)
    assignment_id = request.match_info["assignment_id"]
    message = await message_of(request, Decline.model_validate)
    await service.work.decline(client, assignment_id, message)
    response = web.Response(status=204)
    if refused := _BY_A_PROXY.search(message.reason):  # Counted like the server's own refusals.
        response[PROBLEM] = f"proxy_{refused[1]}"
    return response


@route(
    "POST /v1/score",
    "device",
    Scores,
    request=Score,
    max_body=MAX_BODY_BYTES,
    problems=(
        *("not_found", "assignment_expired", "lease_exhausted", "budget_exhausted"),
        *("run_conflict", "rate_limited", "backend_failed", "backend_unavailable"),
    ),
)
async def score(request: web.Request) -> web.Response:
    """Score prompts with the server's model, under the lease of the device's assignment."""
    service, client = request.app[SERVICE], client_of(request)
    await service.work.check_lease(client)
    body = await raw_body(request)
    body_sha256 = await in_thread_if_large(len(body), _sha256, body)
    await service.work.check_lease(client, body_sha256)
    message = await message_of(request, Score.model_validate, body)
    CONTEXT.get().set_run(service.work.traffic_run(work=(client, message.assignment_id)))
    scores = await service.work.score(client, message, body_sha256)
    return await in_thread_if_large(_size(scores.log_probs), answer, scores)


@route(
    "POST /v1/reflect",
    "device",
    Reflected,
    request=Reflect,
    max_body=MAX_BODY_BYTES,
    problems=(
        *("not_found", "assignment_expired", "lease_exhausted", "budget_exhausted"),
        "backend_failed",
    ),
)
async def reflect(request: web.Request) -> web.Response:
    """Let the run's model write a candidate from examples, once per assignment."""
    service, client = request.app[SERVICE], client_of(request)
    await service.work.check_lease(client)
    message = await message_of(request, Reflect.model_validate)
    CONTEXT.get().set_run(service.work.traffic_run(work=(client, message.assignment_id)))
    return answer(await service.work.reflect(client, message))


@route("GET /v1/runs/{run_id}/task", "member", RunTask)
async def task(request: web.Request) -> web.Response:
    """Return the run's template, label words, loss and method, which do not change."""
    return answer((await run_of(request)).task)


@route(
    "GET /v1/runs/{run_id}/vocabulary",
    "member",
    VocabularyList,
    query={"after": {"type": "integer", "minimum": 0}},
)
async def vocabulary(request: web.Request) -> web.Response:
    """Return the candidates; ``?after=VERSION`` returns those added after a version."""
    run = await run_of(request)
    candidates = run.vocabulary_list(query_number(request, "after", 0, most=10**9 - 1))
    return await in_thread_if_large(32 * len(candidates.candidates or ()), answer, candidates)
