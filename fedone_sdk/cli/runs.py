"""`fedone runs`: looking at the runs of a served aggregator, and steering them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import aiohttp
import typer
from pydantic import ValidationError
from yarl import URL

from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output
from fedone_sdk.cli._report import print_result
from fedone_sdk.cli._signals import stopping
from fedone_sdk.errors import MessageError, SpecError, TransportError
from fedone_sdk.messages import Problem, RoundReport, RunResult

__all__ = ["app"]

app = typer.Typer(
    help="Look at the runs of a server, and steer them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: fedone runs watch sst2 --server https://fedone.example",
)

Server = Annotated[str, typer.Option(metavar="URL", help="The aggregator.")]
Token = Annotated[
    str,
    typer.Option(
        "--admin-token",
        metavar="T",
        envvar="FEDONE_ADMIN_TOKEN",
        show_default=False,
        help="The server's admin token.",
    ),
]
T = TypeVar("T")

RunId = Annotated[str, typer.Argument(metavar="RUN_ID", show_default=False)]


@app.command("list", epilog="Example: fedone runs list --server https://fedone.example")
def list_runs(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the runs."""
    output = Output(json_file)
    runs = json.loads(_call(server, token, "GET", "/v1/runs"))
    output.table(
        ["run", "status", "rounds"],
        ([run["run_id"], run["status"], str(run["round"])] for run in runs),
    )
    output.write_json(runs)


@app.command(epilog="Example: fedone runs show sst2 --server https://fedone.example")
def show(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Show where a run stands, or how it ended."""
    _show(Output(json_file), _call(server, token, "GET", f"/v1/runs/{run_id}"))


@app.command(epilog="Example: fedone runs stop sst2 --server https://fedone.example")
def stop(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """End a run with what it has learnt."""
    _show(Output(json_file), _call(server, token, "POST", f"/v1/runs/{run_id}/stop"))


@app.command(epilog="Example: fedone runs resume sst2 --server https://fedone.example")
def resume(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Let a stopped or failed run go on."""
    _show(Output(json_file), _call(server, token, "POST", f"/v1/runs/{run_id}/resume"))


@app.command(epilog="Example: fedone runs log sst2 --server https://fedone.example > sst2.jsonl")
def log(run_id: RunId, server: Server, token: Token) -> None:
    """Print a run's log: one JSON object per round."""
    typer.echo(_call(server, token, "GET", f"/v1/runs/{run_id}/log"), nl=False)


@app.command(epilog="Example: fedone runs watch sst2 --server https://fedone.example")
def watch(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Follow a run to its end, round by round."""
    output = Output(json_file)
    result = asyncio.run(_watch(output, server, token, run_id))
    if result is None:
        raise typer.Exit(130)
    _show(output, result.model_dump_json().encode())
    # That somebody stopped it is not this command's failure.
    raise typer.Exit(int(result.status == "failed"))


async def _watch(output: Output, server: str, token: str, run_id: str) -> RunResult | None:
    async def follow() -> RunResult:
        async with _request(server, token, "GET", f"/v1/runs/{run_id}/events") as response:
            async for name, data in _events(response.content):
                if name == "end":
                    return _parse(RunResult.model_validate_json, data)
                report = _parse(RoundReport.model_validate_json, data)
                metric = "" if report.metric is None else f", metric {report.metric:.3f}"
                output.console.print(
                    f"round {report.round + 1}, loss {report.mean_loss:.3f}, "
                    f"queries {report.queries}{metric}, {report.client_id}"
                )
        raise TransportError(f"{server}: closed the stream before the run ended")

    following = asyncio.create_task(follow(), name="watch")
    with stopping(following.cancel):
        try:
            return await following
        except asyncio.CancelledError:
            return None


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Server-sent events, as far as this server uses them: one data line each."""
    name, rest = "", b""
    # Not line by line: the last event holds the whole history, more than aiohttp's line limit.
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b": ")
            if field == b"event":
                name = value.decode()
            elif field == b"data":
                yield name, value


def _show(output: Output, body: bytes) -> None:
    result = _parse(RunResult.model_validate_json, body)
    print_result(output, result)
    output.write_json(result.model_dump(mode="json"))


def _call(server: str, token: str, method: str, path: str) -> bytes:
    async def call() -> bytes:
        async with _request(server, token, method, path) as response:
            return await response.read()

    return asyncio.run(call())


@asynccontextmanager
async def _request(
    server: str, token: str, method: str, path: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    base = URL(server)
    if base.scheme not in ("http", "https") or not base.host:
        raise SpecError(f"--server: {server!r} is not an http(s) URL", source="arguments")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            # A redirect would carry the token elsewhere.
            session.request(
                method, base.joinpath(path.lstrip("/")), headers=headers, allow_redirects=False
            ) as response,
        ):
            if response.status >= 300:
                problem = _parse(Problem.model_validate_json, await response.read())
                raise problem.error()
            yield response
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise TransportError(f"{server}: cannot be reached: {exc or type(exc).__name__}") from exc


def _parse(parse: Callable[[bytes], T], body: bytes) -> T:
    try:
        return parse(body)
    except ValidationError as exc:
        raise MessageError("the server does not answer as an aggregator does") from exc
