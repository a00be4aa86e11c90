"""`fedone client`: one edge client on this machine's data."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import structlog
import typer

from fedone_sdk import backends
from fedone_sdk.backends.judge import Judge, load_score
from fedone_sdk.cli._options import BackendFile, caps_of, secret
from fedone_sdk.cli._process import errors_in, json_logs, quiet_logs, stopping
from fedone_sdk.cli._run_file import backend_of
from fedone_sdk.client import ClientEvent, EdgeClient, Hooks, Network, WorkPolicy
from fedone_sdk.data import load_examples
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.spec.sections import RequiredPrivacy
from fedone_sdk.task import ScoreFunction

_log = structlog.get_logger(__name__)


def client(
    server: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    label: Annotated[str | None, typer.Option(envvar="FEDONE_LABEL", show_default="label")] = None,
    field: Annotated[
        list[str] | None, typer.Option(envvar="FEDONE_FIELDS", show_default="all but the label")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="FEDONE_TOKEN", callback=secret)] = None,
    backend_path: BackendFile = None,
    state: Path | None = None,
    run: str | None = None,
    privacy: Annotated[str | None, typer.Option(envvar="FEDONE_PRIVACY")] = None,
    budget: Annotated[list[str] | None, typer.Option(envvar="FEDONE_BUDGET")] = None,
    cert: Path | None = None,
    check: bool = False,
) -> None:
    """Tune prompts as an edge client with this machine's data, until the server's runs have ended.

    At Ctrl-C or SIGTERM the client completes its work and stops; a second signal aborts. Logs are
    JSON lines on standard output. The variables HTTPS_PROXY, HTTP_PROXY and NO_PROXY set a proxy.
    SSL_CERT_FILE names a file of trusted certificate authorities.

    Example: FEDONE_TOKEN=... fedone client --server https://fedone.example --data reviews.jsonl
        --state ~/.fedone

    Args:
        server (URL): The aggregator's URL.
        data (FILE): Labelled examples. Without --backend, their texts are sent to the server.
        label (COLUMN): The column with the label.
        field (COLUMN): A column that runs may put into prompts; repeat the option for several. If
            you name the label column, runs with loss nll send its reference texts to the server.
        token: Enrolment token. Only the variable FEDONE_TOKEN can set it. It is not needed once
            --state contains this client's identity.
        state (DIR): Folder that keeps the client's identity, unsent updates and paid losses.
        run (RUN_ID): Work only for this run. RUN_ID may also be the path of the run's RUN.yaml. The
            client then scores generated texts with the score function that the file names.
        privacy (UNIT:EPSILON): Decline work of runs without differential privacy, and work that
            would raise this client's total epsilon (delta 1e-5) above EPSILON. --state keeps the
            total. UNIT is the unit of protection: label, example or device. Needs --label and
            --field; without --backend, UNIT must be label.
        budget (UNIT=N): Cap the total work of this client. UNIT is queries, or with --backend also
            requests, tokens or usd; repeatable. --state stores the amounts.
        cert (FILE): This device's certificate with its private key (PEM), for mTLS.
        check: Only check whether data and model fit the runs; exit with 1 if they fit no run.
    """
    if check:
        quiet_logs()
    else:
        json_logs()
    required, caps = _required(privacy), caps_of("--budget", budget)
    examples = load_examples(data)
    backend = None if backend_path is None else backend_of(backend_path)
    run_id, score = _run_and_score(run)
    edge = EdgeClient(
        server,
        token=token,
        data=examples,
        label=label,
        fields=field,
        backend=backend,
        state_dir=state,
        policy=WorkPolicy(run_id=run_id, privacy=required, budget=caps),
        hooks=Hooks(on_event=_EventLog(), score=score),
        network=Network(cert_file=cert),
    )
    if check:
        raise typer.Exit(asyncio.run(_check(edge, backend, server)))
    asyncio.run(_work(edge, backend))


def _required(text: str | None) -> RequiredPrivacy | None:
    if text is None:
        return None
    unit, _, epsilon = text.rpartition(":")
    parts = {"unit": unit, "max_epsilon": epsilon}
    return validate_spec(RequiredPrivacy, parts, source="--privacy")


def _run_and_score(run: str | None) -> tuple[str | None, ScoreFunction | None]:
    """Return the id of a run, and the score function that its file names."""
    if run is None or Path(run).suffix not in (".yaml", ".yml"):
        return run, None
    spec = RunSpec.load(run)
    with errors_in(run):
        score = load_score(spec.task, Path(run).parent)
        if isinstance(score, Judge):
            raise SpecError("task.score: a device cannot cap a judge's cost; use another score")
    return spec.name, score


class _EventLog:
    def __init__(self) -> None:
        self._offline = False

    def __call__(self, event: ClientEvent) -> None:
        if event.kind in ("offline", "online"):
            self._offline = event.kind == "offline"
        elif event.kind != "updated" and not (self._offline and event.kind == "waiting"):
            facts = {
                item.name: value
                for item in fields(event)
                if item.name != "kind" and (value := getattr(event, item.name)) is not None
            }
            _log.info(event.kind, **facts)


async def _check(edge: EdgeClient, backend: backends.LLMBackend | None, server: str) -> int:
    async with edge, backend or nullcontext():
        fits = await edge.check()
    typer.echo(f"{server} accepts this client")
    for fit in fits:
        typer.echo(f"rows that fit run {fit}")
    if not fits:
        typer.echo("there is no run that this client may join")
    return int(not any(fit.fit for fit in fits))


async def _work(edge: EdgeClient, backend: backends.LLMBackend | None) -> None:
    async with edge, backend or nullcontext():
        with stopping(edge.stop):
            _log.info("working")
            await edge.run_forever()
            _log.info("done")
