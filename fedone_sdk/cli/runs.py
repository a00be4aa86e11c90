"""`fedone runs`: list, show, follow, stop, resume, roll back and export the runs of a server."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from fedone_sdk.cli import _options
from fedone_sdk.cli._options import JsonFile, RunId, Server, Token, call, command
from fedone_sdk.cli._output import Output, money, print_result
from fedone_sdk.cli._process import quiet_logs, stopping
from fedone_sdk.cli.report import export_run
from fedone_sdk.client import AdminClient
from fedone_sdk.messages import ClientInfluence, RunResult, RunSummary
from fedone_sdk.trackers import TrackedRun, Tracking

app = _options.group(
    "Show and control the runs of a server.",
    example="fedone runs watch sst2 --server https://fedone.example",
)


@command(app, "list")
def list_runs(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the runs.

    Example: fedone runs list --server https://fedone.example
    """
    output = Output(json_file)
    runs = output.write_json(call(server, token, AdminClient.list))
    output.table(_RUNS, map(_run_row, runs))


@command(app)
def show(
    run_id: RunId,
    server: Server,
    token: Token,
    by_client: Annotated[bool, typer.Option("--clients")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show the state or the result of a run.

    Example: fedone runs show sst2 --server https://fedone.example

    Args:
        by_client: Show the influence of each client that has an epsilon (privacy), that is in
            quarantine, or whose updates a defence has examined.
    """
    output = Output(json_file)
    if by_client:
        influences = output.write_json(call(server, token, AdminClient.clients_of, run_id))
        output.table(_CLIENTS, map(_client_row, influences))
    else:
        print_result(output, output.write_json(call(server, token, AdminClient.get, run_id)))


_RUNS = ["run", "status", "rounds", "metric", "devices", "last update", "USD"]
_CLIENTS = ["client", "updates", "share", "scaled", "rejected", "score", "epsilon", "quarantined"]


def _run_row(run: RunSummary) -> list[str]:
    return [
        run.run_id,
        run.status,
        f"{run.round} of {run.rounds}",
        "-" if run.metric is None else f"{run.metric:.3f}",
        "-" if run.devices is None else f"{run.devices.fit} of {run.devices.connected} fit",
        "-" if run.active_at is None else _ago(run.active_at),
        money(run.spent, priced=run.priced),
    ]


def _client_row(client: ClientInfluence) -> list[str]:
    return [
        client.client_id,
        str(client.rounds),
        f"{client.share:.1%}",
        str(client.scaled),
        str(client.outliers),
        f"{client.score:+.1f}",
        "-" if client.epsilon is None else f"{client.epsilon:.2f}",
        "yes" if client.quarantined else "no",
    ]


def _ago(time_s: float) -> str:
    seconds = max(time.time() - time_s, 0.0)
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@command(app)
def stop(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """End a run, and keep its result so far.

    Example: fedone runs stop sst2 --server https://fedone.example
    """
    output = Output(json_file)
    print_result(output, output.write_json(call(server, token, AdminClient.stop, run_id)))


@command(app)
def resume(
    run_id: RunId,
    server: Server,
    token: Token,
    raised: _options.Raised = None,
    json_file: JsonFile = None,
) -> None:
    """Resume a stopped, paused or failed run, or raise the caps of a run.

    --raise sets new caps; it does not add to the old ones. A run that ended because its budget was
    exhausted continues with the new caps.

    Example: fedone runs resume sst2 --raise queries=600 --server https://fedone.example
    """
    caps = _options.caps_of("--raise", raised)

    async def resumed(admin: AdminClient) -> RunResult:
        if caps is not None:
            result = await admin.raise_caps(run_id, caps)
            if result.status not in ("stopped", "failed"):
                return result
        return await admin.resume(run_id)

    output = Output(json_file)
    print_result(output, output.write_json(call(server, token, resumed)))


@command(app)
def rollback(
    run_id: RunId,
    server: Server,
    token: Token,
    to_round: Annotated[int, typer.Option(min=0)],
    reason: Annotated[str, typer.Option()],
    json_file: JsonFile = None,
) -> None:
    """Roll a run back to an earlier round; its spending is unchanged.

    Example: fedone runs rollback sst2 --to-round 40 --reason 'a client lied' --server
        https://fedone.example

    Args:
        to_round (N): The first round to repeat. The results of this round and of all later rounds
            are discarded.
        reason (TEXT): Why the run is rolled back; written to its log.
    """
    output = Output(json_file)
    result = call(server, token, AdminClient.roll_back, run_id, to_round, reason)
    print_result(output, output.write_json(result))


command(app, "export")(export_run)


@command(app)
def watch(
    run_id: RunId,
    server: Server,
    token: Token,
    trackers: _options.Trackers = None,
    json_file: JsonFile = None,
) -> None:
    """Follow a run to its end, round by round.

    Example: fedone runs watch sst2 --server https://fedone.example
    """
    output = Output(json_file)
    quiet_logs()
    with _options.tracking_of(trackers) as tracking:
        result = asyncio.run(_watch(output, server, token, run_id, tracking))
    if result is None:
        raise typer.Exit(130)
    output.write_json(result)
    print_result(output, result)
    # The command has succeeded even if the run was stopped.
    raise typer.Exit(int(result.status == "failed"))


async def _watch(
    output: Output, server: str, token: str, run_id: str, tracking: Tracking
) -> RunResult | None:
    async def follow() -> RunResult | None:
        async with AdminClient(server, token) as admin:
            if tracking.active:
                run = await admin.get(run_id)
                tracking.begin(TrackedRun(run_id=run_id, name=run.name), metric=run.metric.name)
            async for event in admin.events(run_id):
                if isinstance(event, RunResult):
                    tracking.end(event)
                    return event
                tracking.add(event)
                metric = "" if event.metric is None else f", metric {event.metric:.3f}"
                output.console.print(
                    f"round {event.round + 1}, loss {event.mean_loss:.3f}, "
                    f"queries {event.queries}{metric}, {event.client_id}"
                )
        return None

    following = asyncio.create_task(follow(), name="watch")
    with stopping(following.cancel):
        try:
            return await following
        except asyncio.CancelledError:
            return None
