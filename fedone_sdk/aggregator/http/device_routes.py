"""Routes for devices: enrolment, claims, updates, the gateway."""

from __future__ import annotations

import hashlib
import math
import re

from aiohttp import web

from fedone_sdk import messages
from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES, RouteTable
from fedone_sdk.aggregator.http.requests import PROBLEM, RequestContext, answer, bearer_token

route = RouteTable("devices")

_BY_A_PROXY = re.compile(r": answered (4[0-9]{2}), but the answer is not from an aggregator$")
"""Matches the reason of a device that declines work because a proxy refused its request."""


@route(
    "POST /v1/clients",
    "enrolment",
    {201: messages.Enrolled},
    request=messages.Enrol,
    problems=("forbidden",),
)
async def enrol(context: RequestContext) -> web.Response:
    """Enrol a device with an enrolment token.

    The response contains the device's credential. The server stores only a digest of it.
    """
    context.set_run()
    message = await context.message(messages.Enrol.model_validate)
    token = bearer_token(context.request) or ""
    return answer(await context.service.access.enrol(token, message), status=201)


@route("POST /v1/clients/me/credential", "device", messages.Rotated)
async def rotate(context: RequestContext) -> web.Response:
    """Issue a new credential to a device.

    The current credential stays valid until the new one is used, so that the request can be
    repeated if the response is lost.
    """
    token = bearer_token(context.request)
    return answer(await context.service.access.rotate(context.client, token))


@route(
    "POST /v1/assignments/claim",
    "device",
    {200: messages.Assignment, 204: None},
    request=messages.Claim,
    waits=True,
    headers={204: {"Retry-After": "Seconds after which to retry"}},
    problems=("forbidden", "not_found", "model_mismatch", "run_ended", "backend_unavailable"),
)
async def claim(context: RequestContext) -> web.Response:
    """Claim work, and wait for it up to `wait_s` seconds.

    A repeated claim returns the same assignment while it is open. 204 means: no work at present.
    """
    message = await context.message(messages.Claim.model_validate)
    context.set_run(run_id=message.run_id)
    work = await context.service.work.claim(context.client, message)
    if isinstance(work, RetryLater):
        # At least 1 s, so that clients do not poll in a tight loop.
        after_s = max(math.ceil(work.retry_after_s), 1)
        return web.Response(status=204, headers={"Retry-After": str(after_s)})
    context.set_run(run_id=work.run_id)
    array = work.alpha if isinstance(work, messages.AlphaAssignment) else work.prompts
    return await in_thread_if_large(_size(array), answer, work)


@route(
    "POST /v1/assignments/{assignment_id}/update",
    "device",
    messages.Receipt,
    request=messages.Update,
    max_body=MAX_BODY_BYTES,
    problems=("assignment_expired", "update_conflict", "model_mismatch", "run_conflict"),
)
async def update(context: RequestContext) -> web.Response:
    """Send an update. If the same body is sent again, the response is the same."""
    assignment_id = context.parameters["assignment_id"]
    await context.service.work.check_known(context.client, assignment_id)
    body = await context.body()
    message = await context.message(messages.UPDATE.validate_python, body)
    body_sha256 = await in_thread_if_large(len(body), _sha256, body)
    work, client = context.service.work, context.client
    return answer(await work.update(client, assignment_id, message, body_sha256))


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@route(
    "POST /v1/assignments/{assignment_id}/renew",
    "device",
    messages.Renewal,
    problems=("assignment_expired", "renewal_refused"),
)
async def renew(context: RequestContext) -> web.Response:
    """Restart the deadline of an assignment."""
    assignment_id = context.parameters["assignment_id"]
    return answer(await context.service.work.renew(context.client, assignment_id))


def _size(array: messages.Tensor | None) -> int:
    return 0 if array is None else 8 * math.prod(array.shape)


@route(
    "POST /v1/assignments/{assignment_id}/decline",
    "device",
    {204: None},
    request=messages.Decline,
    problems=("assignment_expired", "run_conflict"),
)
async def decline(context: RequestContext) -> web.Response:
    """Decline an assignment."""
    assignment_id = context.parameters["assignment_id"]
    message = await context.message(messages.Decline.model_validate)
    await context.service.work.decline(context.client, assignment_id, message)
    response = web.Response(status=204)
    if refused := _BY_A_PROXY.search(message.reason):  # Counted in `fedone_http_problems`.
        response[PROBLEM] = f"proxy_{refused[1]}"
    return response


@route(
    "POST /v1/score",
    "device",
    messages.Scores,
    request=messages.Score,
    max_body=MAX_BODY_BYTES,
    problems=(
        *("not_found", "assignment_expired", "lease_exhausted", "budget_exhausted"),
        *("run_conflict", "rate_limited", "backend_failed", "backend_unavailable"),
    ),
)
async def score(context: RequestContext) -> web.Response:
    """Score prompts with the server's model. The device's assignment limits the queries."""
    await context.service.work.check_lease(context.client)
    body = await context.body()
    body_sha256 = await in_thread_if_large(len(body), _sha256, body)
    await context.service.work.check_lease(context.client, body_sha256)
    message = await context.message(messages.Score.model_validate, body)
    context.set_run(work=(context.client, message.assignment_id))
    scores = await context.service.work.score(context.client, message, body_sha256)
    return await in_thread_if_large(_size(scores.log_probs), answer, scores)


@route(
    "POST /v1/reflect",
    "device",
    messages.Reflected,
    request=messages.Reflect,
    max_body=MAX_BODY_BYTES,
    problems=(
        *("not_found", "assignment_expired", "lease_exhausted", "budget_exhausted"),
        "backend_failed",
    ),
)
async def reflect(context: RequestContext) -> web.Response:
    """Let a model write a candidate from examples of the device, once per assignment."""
    await context.service.work.check_lease(context.client)
    message = await context.message(messages.Reflect.model_validate)
    context.set_run(work=(context.client, message.assignment_id))
    return answer(await context.service.work.reflect(context.client, message))


@route("GET /v1/runs/{run_id}/task", "member", messages.RunTask)
async def task(context: RequestContext) -> web.Response:
    """Return the run's fixed parts: template, label words, loss and method."""
    return answer((await context.find_run()).task)


@route(
    "GET /v1/runs/{run_id}/vocabulary",
    "member",
    messages.VocabularyList,
    query={"after": {"type": "integer", "minimum": 0}},
)
async def vocabulary(context: RequestContext) -> web.Response:
    """Return the candidates; with ``?after=VERSION``, only candidates added after this version."""
    run = await context.find_run()
    candidates = run.vocabulary_list(context.query_number("after", 0, most=10**9 - 1))
    return await in_thread_if_large(32 * len(candidates.candidates or ()), answer, candidates)
