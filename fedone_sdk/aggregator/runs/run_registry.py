"""The runs of a store: the runs that this process serves, and short records of the others."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import structlog

from fedone_sdk.aggregator.authority import may_see
from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.runs.run_view import RunView, reading
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, ProblemError, SpecError, StoreUnavailable
from fedone_sdk.messages import Cap, RunEntry, RunSummary
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, RunHead, RunRecord, Store
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)

_MAX_CHECKS = 8
"""Maximal number of concurrent model checks."""
_MAX_ENDED = 64
"""Maximal number of ended runs that stay in memory."""
_ROUNDS = RunSpec.model_fields["rounds"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A short record of a stored run, without its candidates, arrays and log.

    Attributes:
        live: Whether the run must be served, because it is running or paused or has open work.
        final: Whether the run has ended and cannot be resumed.
        clients: Enrolment indices of the clients that the run's state refers to: clients with a
            seat in the current round, in quarantine, or with an epsilon above 0.
    """

    version: int
    live: bool
    final: bool
    clients: frozenset[int]
    summary: RunSummary

    @classmethod
    def of(cls, head: RunHead) -> Self:
        """Return the record of a stored run; a ``ValueError`` if its document is damaged."""
        try:
            document = json.loads(head.document)
            status, account = document["status"], document["account"]
            open_work = document["seats"] or account["leases"] or document["evaluation"]["leases"]
            return cls(
                version=head.version,
                live=status == "running" or document["paused"] or bool(open_work),
                final=status not in ("running", "stopped", "failed"),
                clients=frozenset(
                    [seat["client"] for seat in document["seats"]]
                    + [*document["quarantined"], *map(int, document["releases"])]
                ),
                summary=RunSummary(
                    run_id=head.run_id,
                    status=status,
                    round=document["round"],
                    rounds=json.loads(head.spec).get("rounds", _ROUNDS),
                    cap=Cap.model_validate(account["cap"] or {}),
                    spent=Usage.model_validate(account["spent"]),
                    priced=not document["counters"]["unpriced"],
                    created_at=head.created_at,
                    ended_at=document["ended_at"],
                    metric=document["metric"]["after"],
                    metric_name=document["metric"]["name"],
                ),
            )
        except (AttributeError, KeyError, RecursionError, TypeError) as exc:
            raise ValueError(f"not a run's state: {exc}") from exc

    @classmethod
    def of_run(cls, run: RunView) -> Self:
        """Return the record that replaces a served run when it is unloaded."""
        state = run.state
        return cls(
            version=run.version,
            live=run.live,
            final=not (state.running or state.can_resume),
            clients=frozenset(
                {*(seat.client for seat in state.seats), *state.quarantined, *state.releases}
            ),
            summary=run.summary,
        )


@dataclass(kw_only=True, eq=False)
class RunRegistry:
    """Loads runs on demand, and follows the runs that other replicas add and remove.

    Args:
        new_run: Creates a run, without its stored state; raises a `SpecError` if it is invalid.
        check_model: Checks that a run's model is available.
        must_stay: Returns whether an ended run, given by its id, must stay in memory.

    Attributes:
        served: Live runs, and other runs that were requested, by id.
        stored: Records of all other runs in the store, by id.
    """

    store: Store
    new_run: Callable[[str, RunSpec, Vocabulary], ServedRun]
    check_model: Callable[[ServedRun], Awaitable[None]]
    on_loaded: Callable[[ServedRun], None]
    on_removed: Callable[[str, ServedRun | None], Awaitable[None]]
    must_stay: Callable[[str], bool]
    served: dict[str, ServedRun] = field(default_factory=dict, init=False)
    stored: dict[str, StoredRun] = field(default_factory=dict, init=False)
    _loading: dict[str, asyncio.Task[ServedRun | None]] = field(default_factory=dict, init=False)
    _checks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _check_limit: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MAX_CHECKS), init=False
    )

    async def get_or_load(self, run_id: str) -> ServedRun | None:
        """Return the run of this name, loaded from the store if necessary; None if missing."""
        run = self.served.get(run_id)
        if run is not None:
            return run
        loading = self._loading.get(run_id)
        if loading is None:
            loading = asyncio.create_task(self._read(run_id), name=f"loading {run_id}")
            self._loading[run_id] = loading
            loading.add_done_callback(lambda _: self._loading.pop(run_id, None))
        return await asyncio.shield(loading)

    async def run(self, run_id: str) -> ServedRun:
        """Return the run of this name, with its newest state, or raise a `ProblemError`."""
        try:
            run = await self.get_or_load(run_id)
        except SpecError as exc:
            raise ProblemError("run_conflict", "; ".join(exc.problems)) from exc
        if run is None:
            raise ProblemError("not_found", f"there is no run {run_id!r}")
        await run.catch_up()
        return run

    async def run_for(self, client: ClientRecord, run_id: str) -> ServedRun:
        """Return a run; raise ``not_found`` if the client may not access it."""
        if not may_see(client.runs, run_id):
            raise ProblemError("not_found", f"there is no run {run_id!r}")
        return await self.run(run_id)

    def runs_for(self, client: ClientRecord) -> list[RunEntry]:
        """Return the runs that a client may access."""
        return [one.entry for one in self.summaries if may_see(client.runs, one.run_id)]

    async def _read(self, run_id: str) -> ServedRun | None:
        record = await self.store.run(run_id)
        if record is None or run_id in self.served:
            return self.served.get(run_id)
        run = await self._load(record)
        self._unload_ended()
        return run

    def _unload_ended(self) -> None:
        """Unload ended runs, except the newest `_MAX_ENDED`; a request loads a run again."""
        ended = [
            run
            for run_id, run in self.served.items()
            if not (run.live or self.must_stay(run_id)) and run.model_checked.is_set()
        ]
        for run in ended[:-_MAX_ENDED]:
            del self.served[run.run_id]
            self.stored[run.run_id] = StoredRun.of_run(run)

    async def _load(self, record: RunRecord) -> ServedRun:
        with reading(record.run_id):
            spec = RunSpec.model_validate_json(record.spec)
            vocabulary = Vocabulary.parse(record.candidates)
            run = self.new_run(record.run_id, spec, vocabulary)
            await run.load(record)
        self.served[run.run_id] = run
        stored = self.stored.pop(run.run_id, None)
        if stored is None or stored.live:
            run.model_checked.clear()
            self._checks[run.run_id] = asyncio.create_task(
                self._check_model(run), name=f"model of {run.run_id}"
            )
        self.on_loaded(run)
        _log.info("run loaded", run_id=run.run_id, status=run.state.status)
        return run

    async def _check_model(self, run: ServedRun) -> None:
        try:
            async with self._check_limit:
                try:
                    await self.check_model(run)
                except (BackendError, SpecError) as exc:
                    await run.pause(exc)
                await _check_same_model(run)
        except Exception:
            # A bug in a backend pauses the run; only the log contains the details.
            lines, failed = traceback.format_exc(), "the model could not be checked"
            _log.error(failed, run_id=run.run_id, traceback=lines)
            await run.pause(f"{failed}; see the log")
        finally:
            self._checks.pop(run.run_id, None)
            run.model_checked.set()

    async def load_live(self) -> None:
        """Load all live runs and start the checks of their models."""
        for run_id, stored in list(self.stored.items()):
            try:
                if stored.live:
                    await self.get_or_load(run_id)
            except StoreUnavailable:
                raise
            except Exception as exc:
                _log_unreadable(run_id, exc)

    async def wait_checked(self) -> None:
        """Wait until the models of all loaded runs are checked."""
        await asyncio.gather(*self._checks.values())

    async def stop(self) -> None:
        """Cancel pending loads, then the checks of models, which loads start."""
        for tasks in (self._loading, self._checks):
            pending = [*tasks.values()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def read_heads(self) -> None:
        """Read the records in `stored` again from the store."""
        heads = await self.all_heads()
        self.stored = {run_id: run for run_id, run in heads.items() if run_id not in self.served}

    async def all_heads(self) -> dict[str, StoredRun]:
        """Return the records of all runs in the store, by id."""
        heads = await self.store.heads()
        size = sum(len(head.document) + len(head.spec) for head in heads)
        return await in_thread_if_large(size, _parse_heads, heads)

    async def refresh(self, *, lazily: bool = False) -> None:
        """Load the changes of other replicas; if `lazily`, only mark served runs as outdated."""
        known = self.served.keys() | self.stored.keys()
        versions = await self.store.versions()
        for run_id in known - versions.keys():
            await self.remove(run_id)
        heads = {run_id: head.version for run_id, head in self.stored.items()}
        others = versions.keys() - self.served.keys()
        changed = {run_id for run_id in others if heads.get(run_id) != versions[run_id]}
        if changed:
            await self.read_heads()
        for run_id, version in versions.items():
            run, head = self.served.get(run_id), self.stored.get(run_id)
            try:
                if run is not None:
                    run.on_remote_version(version)
                    if not lazily:
                        await run.catch_up()
                elif (head is None or head.live) and (run_id in changed or not lazily):
                    await self.get_or_load(run_id)
            except Exception as exc:
                _log_unreadable(run_id, exc)

    async def remove(self, run_id: str) -> None:
        """Remove a run that was deleted by this or another replica."""
        self.stored.pop(run_id, None)
        await self.on_removed(run_id, self.served.pop(run_id, None))

    @property
    def summaries(self) -> list[RunSummary]:
        """Summaries of all runs known to this replica, in order of creation."""
        summaries = [run.summary for run in self.served.values()]
        summaries += [stored.summary for stored in self.stored.values()]
        return sorted(summaries, key=lambda summary: summary.created_at or 0.0)


async def _check_same_model(run: ServedRun) -> None:
    before, now = run.state.model, run.machine.gateway_model
    if before and now and before != now:
        models = f"the server's model is {now!r}, but the run used {before!r}"
        reason = f"{models}; resume the run to accept the server's model"
        if reason not in (run.state.reason or ""):
            await run.pause(reason)
            run.was_stopped = False  # Otherwise `fedone tune` would resume the run.


def _log_unreadable(run_id: str, exc: Exception) -> None:
    """Log why a run cannot be read, for example because a newer version has written it."""
    facts = {"traceback": "".join(traceback.format_exception(exc))}
    if isinstance(exc, SpecError):
        facts = {"reason": "; ".join(exc.problems)}
    _log.error("a run cannot be read", run_id=run_id, **facts)


def _parse_heads(heads: Iterable[RunHead]) -> dict[str, StoredRun]:
    runs = {}
    for head in heads:
        try:
            runs[head.run_id] = StoredRun.of(head)
        except ValueError as exc:
            _log_unreadable(head.run_id, exc)
    return runs
