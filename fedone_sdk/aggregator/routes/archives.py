"""Routes for export and import of runs."""

from __future__ import annotations

from aiohttp import web

from fedone_sdk.aggregator.archives.writing import export_pages
from fedone_sdk.aggregator.http.requests import answer, body_of, streamed
from fedone_sdk.aggregator.routes.context import CONTEXT, SERVICE, run_of
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.errors import ArchiveError, ProblemError
from fedone_sdk.messages import RunResult

_GZIP = "application/gzip"
_MAX_ARCHIVE_BYTES = 256 * 1024 * 1024


async def export_run(request: web.Request) -> web.StreamResponse:
    """Export a run with all its data as one file.

    `credentials=true` includes the digests of its clients' credentials, so that the devices can
    continue to work for it elsewhere.
    """
    given = request.query.get("credentials", "false")
    if given not in ("true", "false"):
        raise ProblemError("invalid_message", "credentials: must be true or false")
    run = await run_of(request)
    store = request.app[SERVICE].store
    pages = export_pages(store, run.run_id, with_credentials=given == "true")
    name = f'attachment; filename="{run.run_id}.fedone.gz"'
    return await streamed(request, pages, content_type=_GZIP, headers={"Content-Disposition": name})


async def import_run(request: web.Request) -> web.Response:
    """Import an exported run; no run of its name may exist.

    Requires a token that is valid for all runs.
    """
    person = CONTEXT.get().person
    if person is None or person.runs is not None:
        # The name of the run is inside the archive.
        raise ProblemError("forbidden", "your token is not valid for all runs")
    if request.content_type != _GZIP:
        raise ProblemError("not_gzip", f"the body is {request.content_type}")
    try:
        run = await request.app[SERVICE].import_run(
            await body_of(request, max_bytes=_MAX_ARCHIVE_BYTES)
        )
    except ArchiveError as exc:
        raise ProblemError("invalid_run", str(exc)) from exc
    response = answer(run.result(), status=201)
    response.headers["Location"] = f"/v1/runs/{run.run_id}"
    return response


ARCHIVES = (
    Route(
        method="GET",
        path="/v1/runs/{run_id}/export",
        handler=export_run,
        access="admin",
        tag="runs",
        summary="Export a run",
        query={"credentials": {"type": "boolean", "default": False}},
        answers={200: _GZIP},
        headers={200: {"Content-Disposition": "A name for the file"}},
        problems=("invalid_message",),
    ),
    Route(
        method="POST",
        path="/v1/runs/import",
        handler=import_run,
        access="admin",
        tag="runs",
        summary="Import a run",
        request=_GZIP,
        max_body=_MAX_ARCHIVE_BYTES,
        answers={201: RunResult},
        headers={201: {"Location": "Path of the run"}},
        problems=("not_gzip", "invalid_run"),
    ),
)
