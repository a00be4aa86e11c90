"""`fedone runs`: looking at the runs of a served aggregator, and steering them."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from fedone_sdk.budget import Budget
from fedone_sdk.cli._options import (
    JsonFile,
    RunId,
    Server,
    Token,
    Trackers,
    call,
    group,
    tracking_of,
)
from fedone_sdk.cli._output import Output, money, plural
from fedone_sdk.cli._process import quiet_logs, stopping
from fedone_sdk.cli._report import print_result
from fedone_sdk.cli.export import export_run
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError, ProblemError
from fedone_sdk.messages import Removal, RunResult
from fedone_sdk.spec import validate_spec
from fedone_sdk.trackers import TrackedRun, Tracking

app = group(
    "Look at the runs of a server, and steer them.",
    example="fedone runs watch sst2 --server https://fedone.example",
)


@app.command("list", epilog="Example: fedone runs list --server https://fedone.example")
def list_runs(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the runs."""
    output = Output(json_file)
    runs = call(server, token, AdminClient.list)
    output.write_json(runs)
    output.table(
        ["run", "status", "rounds", "metric", "devices", "last update", "USD"],
        (
            [
                run.run_id,
                run.status,
                f"{run.round} of {run.rounds}",
                "-" if run.metric is None else f"{run.metric:.3f}",
                "-" if run.devices is None else f"{run.devices.fit} of {run.devices.connected} fit",
                "-" if run.active_at is None else _ago(run.active_at),
                money(run.spent, priced=run.priced),
            ]
            for run in runs
        ),
    )


def _ago(at: float) -> str:
    seconds = max(time.time() - at, 0.0)
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@app.command(epilog="Example: fedone runs show sst2 --server https://fedone.example")
def show(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Show where a run stands, or how it ended."""
    _show(Output(json_file), call(server, token, lambda admin: admin.get(run_id)))


@app.command(epilog="Example: fedone runs clients sst2 --server https://fedone.example")
def clients(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Show what each client has done to a run.

    Known are the clients that the run's defences judged, that its privacy counts, or that are in
    quarantine.
    """
    output = Output(json_file)
    found = call(server, token, lambda admin: admin.clients_of(run_id))
    output.write_json(found)
    output.table(
        ["client", "updates", "share", "scaled", "held back", "score", "epsilon", "quarantined"],
        (
            [
                line.client_id,
                str(line.rounds),
                f"{line.share:.1%}",
                str(line.scaled),
                str(line.outliers),
                f"{line.score:+.1f}",
                "-" if line.epsilon is None else f"{line.epsilon:.2f}",
                "yes" if line.quarantined else "no",
            ]
            for line in found
        ),
    )


@app.command(epilog="Example: fedone runs stop sst2 --server https://fedone.example")
def stop(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """End a run with what it has learnt."""
    _show(Output(json_file), call(server, token, lambda admin: admin.stop(run_id)))


@app.command(epilog="Example: fedone runs resume sst2 --server https://fedone.example")
def resume(run_id: RunId, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Let a stopped or failed run go on."""
    _show(Output(json_file), call(server, token, lambda admin: admin.resume(run_id)))


@app.command(
    "raise", epilog="Example: fedone runs raise sst2 --queries 600 --server https://fedone.example"
)
def raise_caps(
    run_id: RunId,
    server: Server,
    token: Token,
    queries: Annotated[int | None, typer.Option(metavar="N", help="Training queries.")] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Requests to the model.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of all kinds.")] = None,
    usd: Annotated[float | None, typer.Option(metavar="X", help="US dollars.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Raise caps of a run; a run that ended at its budget continues.

    Values are the new caps, not increments.
    """
    output = Output(json_file)
    given = {"queries": queries, "requests": requests, "tokens": tokens, "usd": usd}
    caps = validate_spec(
        Budget,
        {unit: cap for unit, cap in given.items() if cap is not None},
        source="arguments",
    )
    _show(output, call(server, token, lambda admin: admin.raise_caps(run_id, caps)))


@app.command(
    epilog="Example: fedone runs delete --older-than-days 90 --dry-run "
    "--server https://fedone.example"
)
def delete(
    server: Server,
    token: Token,
    run_ids: Annotated[list[str] | None, typer.Argument(metavar="[RUN_ID]...")] = None,
    older_than_days: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="All runs that ended longer ago; those that run or are paused stay.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Delete runs that have ended, with their logs, for good; their names stay taken.

    A new run of such a name would spend its budget again. To keep its rounds, export it first.
    """
    output = Output(json_file)
    if (not run_ids) == (older_than_days is None):
        raise ArgumentError("give run ids or --older-than-days")

    async def delete_all(admin: AdminClient) -> list[Removal]:
        chosen = run_ids or []
        if older_than_days is not None:
            before = time.time() - older_than_days * 86_400
            chosen = [
                run.run_id
                for run in await admin.list()
                if run.ended_at is not None and run.ended_at < before
            ]
        removed = []
        for run_id in chosen:
            try:
                removed.append(await admin.delete(run_id, dry_run=dry_run))
            except ProblemError as exc:
                # A paused run, or one that was resumed or deleted in the meantime.
                if older_than_days is None or exc.code not in ("run_conflict", "not_found"):
                    raise
        return removed

    removed = call(server, token, delete_all)
    output.write_json(removed)
    are = "would be" if dry_run else "is" if len(removed) == 1 else "are"
    output.heading(f"{plural(len(removed), 'run')} {are} deleted")
    output.table(
        ["run", "status", "queries", "log lines", "closed work"],
        (
            [
                removal.run_id,
                removal.status,
                str(removal.spent.queries),
                str(removal.log_lines),
                str(removal.closed_work),
            ]
            for removal in removed
        ),
    )


@app.command(
    epilog="Example: fedone runs rollback sst2 --to-round 40 --reason 'a client lied' "
    "--server https://fedone.example"
)
def rollback(
    run_id: RunId,
    server: Server,
    token: Token,
    to_round: Annotated[
        int,
        typer.Option(
            "--to-round",
            metavar="N",
            min=0,
            help="The round to do again first; later ones count as not done.",
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For the log.")],
    json_file: JsonFile = None,
) -> None:
    """Set a run back to an earlier round; what it spent stays spent."""
    output = Output(json_file)
    if not 1 <= len(reason) <= 500:
        raise ArgumentError("--reason: needs 1 to 500 characters")
    _show(output, call(server, token, lambda admin: admin.roll_back(run_id, to_round, reason)))


app.command(
    "export", epilog="Example: fedone runs export sst2 --as prompt -o sst2.json --store fedone.db"
)(export_run)


@app.command(epilog="Example: fedone runs watch sst2 --server https://fedone.example")
def watch(
    run_id: RunId,
    server: Server,
    token: Token,
    trackers: Trackers = None,
    json_file: JsonFile = None,
) -> None:
    """Follow a run to its end, round by round."""
    output = Output(json_file)
    quiet_logs()
    with tracking_of(trackers) as tracking:
        result = asyncio.run(_watch(output, server, token, run_id, tracking))
    if result is None:
        raise typer.Exit(130)
    _show(output, result)
    # A stopped run is not a failure of this command.
    raise typer.Exit(int(result.status == "failed"))


async def _watch(
    output: Output, server: str, token: str, run_id: str, tracking: Tracking
) -> RunResult | None:
    async def follow() -> RunResult | None:
        async with AdminClient(server, token) as admin:
            if tracking.active:
                now = await admin.get(run_id)
                tracking.begin(TrackedRun(run_id=run_id, name=now.name), metric=now.metric.name)
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


def _show(output: Output, result: RunResult) -> None:
    output.write_json(result)
    print_result(output, result)
