"""Routes for users: start, read, watch, monitor and control runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fedone_sdk import messages
from fedone_sdk.aggregator.authority import AdminToken
from fedone_sdk.aggregator.concurrency import in_thread
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES, RouteTable
from fedone_sdk.aggregator.http.requests import RequestContext, answer, streamed
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import RunState
from fedone_sdk.aggregator.runs.changes import Feed
from fedone_sdk.aggregator.runs.run_view import export_run
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.algorithms.defence import ledger
from fedone_sdk.budget import Budget
from fedone_sdk.candidates import instructions, label_sets
from fedone_sdk.errors import BackendError, DataError, MissingExtraError, ProblemError, SpecError
from fedone_sdk.spec import OwnMethodSpec, RunSpec, validate_spec
from fedone_sdk.vocabulary import ListVocabulary, Vocabulary

route = RouteTable("runs")

_INFLUENCES = TypeAdapter(list[messages.ClientInfluence])
_JSON = TypeAdapter(dict[str, Any])
_LISTED = TypeAdapter(Sequence[messages.RunSummary | messages.RunEntry])

_POSTABLE = (ListVocabulary, instructions.InstructionsSource, label_sets.LabelsSource)
"""Sources of candidates that a posted run may use: they read no files and no training texts."""

_RESUMING = ("run_conflict", "backend_blocked", "backend_unavailable")
_MAX_TOKENS, _DEFAULT_TOKENS = 32, 8
"""Maximal and default number of tokens per position in ``/probabilities``."""

_KEEPALIVE_S = 15.0
"""Interval of comments that keep proxies from closing an idle stream, seconds."""


@route(
    "POST /v1/runs",
    "operator",
    {201: messages.RunResult},
    request=RunSpec,
    max_body=MAX_BODY_BYTES,
    headers={201: {"Location": "Path of the run"}},
    problems=("invalid_run", "run_conflict"),
)
async def add_run(context: RequestContext) -> web.Response:
    """Start a run. It uses the server's backend, and its candidates cannot come from files."""
    service = context.service
    document = await context.message(_JSON.validate_python)
    try:
        spec = validate_spec(RunSpec, document, source="run").served()
        if refusal := next(_refusals(spec), None):
            raise SpecError(refusal, source="run")
        if not context.may_see(spec.name):
            raise ProblemError("forbidden", f"your token is not valid for runs named {spec.name!r}")
        if spec.name in service.runs or spec.name in service.registry.stored:
            raise ProblemError("run_conflict", f"a run {spec.name!r} exists already")
        run = await service.add_run(spec)
    except (SpecError, DataError, BackendError, MissingExtraError) as exc:
        raise ProblemError("invalid_run", str(exc)) from exc
    response = answer(run.result(), status=201)
    response.headers["Location"] = f"/v1/runs/{run.run_id}"
    return response


def _refusals(spec: RunSpec) -> Iterator[str]:
    """Yield an error for each key of a posted run that names a file, a module or a model."""
    if spec.data is not None:
        yield "data: clients have their own data; leave it out"
    for key, source in spec.prompt.sources:
        if not isinstance(source, _POSTABLE):
            allowed = "list" if spec.prompt.vocabulary else "list, instructions or labels"
            yield f"{key}.kind: must be {allowed} in a posted run"
    if isinstance(spec.method, OwnMethodSpec):
        own = "method.name: must not be own in a posted run"
        yield f"{own}; add the run's file to `runs` in the server's config instead"
    if spec.prompt.proposer is not None:
        yield "prompt.proposer: is not supported in a posted run"
    if spec.backend != RunSpec.model_fields["backend"].default:
        yield "backend: the run uses the server's backend; leave it out"


@route("GET /v1/runs", "member", list[messages.RunSummary | messages.RunEntry])
async def runs(context: RequestContext) -> web.Response:
    """List the runs that the caller may access, in order of creation.

    For devices, the list contains only the name, state and rounds of each run.
    """
    is_person = isinstance(context.caller, AdminToken)
    visible = [
        _with_devices(context.service, summary) if is_person else summary.entry
        for summary in context.service.registry.summaries
        if context.may_see(summary.run_id)
    ]
    return web.Response(body=_LISTED.dump_json(visible), content_type="application/json")


def _with_devices(service: Service, summary: messages.RunSummary) -> messages.RunSummary:
    run = service.runs.get(summary.run_id)
    if run is None or not run.state.running:
        return summary
    devices = service.dispatcher.count_devices(run, reasons=False)
    return summary.model_copy(update={"devices": devices})


@route(
    "GET /v1/runs/{run_id}",
    "viewer",
    messages.RunResult,
    query={"history": {"type": "boolean", "default": True}},
)
async def run(context: RequestContext) -> web.Response:
    """Return the current or final result of a run.

    With `history=false`, the rounds are left out. For viewers, `reason` does not contain texts of
    the model's provider or of devices, and `devices` does not contain why devices declined.
    """
    history = context.query_flag("history", default=True)
    result = _result(context, await context.find_run())
    return answer(result if history else result.model_copy(update={"history": ()}))


def _result(context: RequestContext, run: ServedRun) -> messages.RunResult:
    result, is_operator = run.result(), context.person.allows("operator")
    if run.state.running:
        devices = context.service.dispatcher.count_devices(run, reasons=is_operator)
        result = result.model_copy(update={"devices": devices})
    if is_operator:
        return result
    proposer = result.proposer and result.proposer.model_copy(update={"failure": None})
    shown = {"reason": run.state.summary or result.reason, "proposer": proposer}
    return result.model_copy(update=shown)


@route("GET /v1/runs/{run_id}/prompt", "member", messages.PromptReport)
async def prompt(context: RequestContext) -> web.Response:
    """Return the prompt that the run would return if it ended now."""
    return answer((await context.find_run()).prompt())


@route("GET /v1/runs/{run_id}/log", "operator", "application/jsonl")
async def log(context: RequestContext) -> web.StreamResponse:
    """Return a run as JSON lines: its description, its log (oldest line first), its result."""
    pieces = export_run(context.service.store, await context.find_run())
    return await streamed(context.request, pieces, content_type="application/jsonl")


@route("GET /v1/runs/{run_id}/events", "viewer", "text/event-stream")
async def events(context: RequestContext) -> web.StreamResponse:
    """Stream a run as server-sent events: `round` for every past and future round, then `end`.

    The event of a round is sent again when its metric is known. A stream that closes without `end`
    was interrupted; a new connection gets all rounds again.
    """
    run = await context.find_run()
    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    with Feed(run, context.service.listeners) as feed, suppress(ConnectionError):
        await response.prepare(context.request)
        while not context.service.draining:
            for report in feed.take():
                await _event(response, "round", report)
            if not (run.state.running or feed.has_more):
                await _event(response, "end", _result(context, run))
                return response
            try:
                async with asyncio.timeout(_KEEPALIVE_S):
                    await feed.wait()
            except TimeoutError:
                await response.write(b": keep-alive\n\n")
    return response


async def _event(response: web.StreamResponse, name: str, message: messages.Message) -> None:
    await response.write(f"event: {name}\ndata: {message.model_dump_json()}\n\n".encode())


@route("POST /v1/runs/{run_id}/stop", "operator", messages.RunResult, problems=("run_conflict",))
async def stop(context: RequestContext) -> web.Response:
    """Stop a run and keep its result."""
    run = await context.find_run()
    await context.service.stop_run(run)
    return answer(run.result())


@route("POST /v1/runs/{run_id}/resume", "operator", messages.RunResult, problems=_RESUMING)
async def resume(context: RequestContext) -> web.Response:
    """Resume a stopped, paused or failed run with the server's current model."""
    run = await context.find_run()
    await context.service.resume_run(run)
    return answer(run.result())


@route(
    "POST /v1/runs/{run_id}/budget",
    "operator",
    messages.RunResult,
    request=Budget,
    problems=_RESUMING,
)
async def raise_caps(context: RequestContext) -> web.Response:
    """Raise caps of a run; a run that ended because its budget was exhausted continues.

    Omitted caps do not change. If the same body is sent again, it has no effect.
    """
    run = await context.find_run()
    caps = await context.message(Budget.model_validate)
    await context.service.raise_caps(run, caps)
    return answer(run.result())


@route(
    "DELETE /v1/runs/{run_id}",
    "admin",
    messages.Removal,
    query={"dry_run": {"type": "boolean", "default": False}},
    problems=("run_conflict",),
)
async def delete_run(context: RequestContext) -> web.Response:
    """Delete an ended run with its log and all its data.

    The run's name stays reserved, because a new run of this name would spend the budget again. With
    `dry_run=true`, nothing is deleted, and the response describes what would be deleted.
    """
    dry = context.query_flag("dry_run", default=False)
    run = await context.find_run()
    return answer(await context.service.delete_run(run, dry=dry))


@route(
    "POST /v1/runs/{run_id}/rollback",
    "operator",
    messages.RunResult,
    request=messages.RollBack,
    problems=("run_conflict",),
)
async def roll_back(context: RequestContext) -> web.Response:
    """Roll a run back to an earlier round. The spending of later rounds stays counted."""
    run = await context.find_run()
    message = await context.message(messages.RollBack.model_validate)
    await context.service.roll_back(run, message.to_round, message.reason)
    return answer(run.result())


@route(
    "POST /v1/runs/{run_id}/clients/{client_id}/quarantine",
    "operator",
    {204: None},
    request=messages.Quarantine,
    problems=("run_conflict",),
)
async def quarantine(context: RequestContext) -> web.Response:
    """Put a client in quarantine: it gets no work of the run, and its open work is discarded."""
    run = await context.find_run()
    message = await context.message(messages.Quarantine.model_validate)
    client_id = context.parameters["client_id"]
    await context.service.quarantine(run, client_id, message.reason)
    return web.Response(status=204)


@route(
    "POST /v1/runs/{run_id}/clients/{client_id}/release",
    "operator",
    {204: None},
    problems=("run_conflict",),
)
async def release(context: RequestContext) -> web.Response:
    """Release a client from quarantine."""
    client_id = context.parameters["client_id"]
    await context.service.lift_quarantine(await context.find_run(), client_id)
    return web.Response(status=204)


@route("GET /v1/runs/{run_id}/seats", "viewer", messages.Seats)
async def seats(context: RequestContext) -> web.Response:
    """Return the clients of the current round, the number of waiting clients, and lost work."""
    run = await context.find_run()
    service, state, now = context.service, run.state, context.service.clock.now()
    busy = {seat.client for seat in state.seats if seat.phase != "done"}
    waiting = service.dispatcher.available(run).keys() - busy
    names = await service.access.names([seat.client for seat in state.seats])
    reports = [
        messages.SeatReport(
            number=seat.number,
            client_id=name,
            phase=seat.phase,
            step=seat.step,
            due_in_s=None if seat.phase == "done" else round(max(seat.due - now, 0.0), 3),
        )
        for seat, name in zip(state.seats, names, strict=True)
    ]
    lost = tuple(run.lost)
    if not context.person.allows("operator"):
        lost = tuple(each.model_copy(update={"said": None}) for each in lost)
    return answer(
        messages.Seats(round=state.round, waiting=len(waiting), seats=tuple(reports), lost=lost)
    )


@route(
    "GET /v1/runs/{run_id}/probabilities",
    "viewer",
    messages.TokenProbabilities,
    query={"top": {"type": "integer", "minimum": 1, "maximum": _MAX_TOKENS}},
)
async def probabilities(context: RequestContext) -> web.Response:
    """Return the most probable tokens of each position of a run."""
    top = context.query_number("top", _DEFAULT_TOKENS, least=1, most=_MAX_TOKENS)
    run = await context.find_run()
    state = run.state
    # Computed in a thread, because alpha has up to four million numbers.
    positions = await in_thread(likeliest, state.method.alpha, run.vocabulary, top)
    return answer(
        messages.TokenProbabilities(
            round=state.round,
            vocab_size=len(run.vocabulary),
            positions=positions,
            labels=tuple(run.spec.task.labels),
        )
    )


@route("GET /v1/runs/{run_id}/clients", "viewer", list[messages.ClientInfluence])
async def run_clients(context: RequestContext) -> web.Response:
    """Return each client's influence on a run, from the run's defences and privacy accounting."""
    run = await context.find_run()
    lines = client_influences(run.machine, run.state)
    names = await context.service.access.names(list(lines))
    influences = [
        line.model_copy(update={"client_id": name})
        for line, name in zip(lines.values(), names, strict=True)
    ]
    return web.Response(body=_INFLUENCES.dump_json(influences), content_type="application/json")


def likeliest(
    alpha: NDArray[np.float32], vocabulary: Vocabulary, top: int
) -> tuple[messages.PositionProbabilities, ...]:
    """Return the `top` most probable tokens (candidates) of every position.

    `alpha` has one row of weights per position. A probability is a weight divided by its row's sum.
    """
    weights = alpha.astype(np.float64)
    shares = weights / weights.sum(axis=1, keepdims=True)
    # Candidates with probability 0 contribute nothing to the entropy.
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies = -(shares * logs).sum(axis=1)
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    positions = []
    for position, (entropy, row, known) in enumerate(zip(entropies, order, shares, strict=True)):
        candidates = vocabulary.of_position(position)
        positions.append(
            messages.PositionProbabilities(
                entropy=abs(round(float(entropy), 6)),
                tokens=tuple(
                    messages.TokenProbability(
                        token=candidates[index], probability=round(float(known[index]), 6)
                    )
                    for index in row.tolist()
                    if index < len(candidates)
                ),
            )
        )
    return tuple(positions)


def client_influences(
    machine: RoundMachine, state: RunState
) -> dict[int, messages.ClientInfluence]:
    """Return each client's contribution, quarantine and privacy loss, by enrolment index."""
    judged = {line.client: line for line in ledger(state.defence)}
    movement = math.fsum(line.movement for line in judged.values())
    influences = {}
    for client in sorted(judged.keys() | state.quarantined | state.releases.keys()):
        of_defence: dict[str, float] = {}
        if (line := judged.get(client)) is not None:
            of_defence = {**asdict(line), "share": line.movement / movement if movement else 0.0}
            del of_defence["client"]
        # A release is an update with noise. In a run without noise `machine.releases` is None.
        releases, noised = state.releases.get(client, 0), machine.releases
        influences[client] = messages.ClientInfluence.model_validate(
            {
                **of_defence,
                "quarantined": client in state.quarantined,
                "releases": releases,
                "epsilon": None if noised is None else noised.accountant.epsilon(releases),
            }
        )
    return influences
