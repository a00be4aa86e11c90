"""The service: what an aggregator does, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain

import structlog

from fedone_sdk.aggregator import signals
from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.aggregator.concurrency import in_thread, wait_pending
from fedone_sdk.aggregator.dispatch.dispatcher import Dispatcher
from fedone_sdk.aggregator.dispatch.open_work import OpenWork
from fedone_sdk.aggregator.model import calls
from fedone_sdk.aggregator.model.evaluation import Evaluation
from fedone_sdk.aggregator.model.gateway import ModelGateway
from fedone_sdk.aggregator.model.proposer import Proposer, Reflections
from fedone_sdk.aggregator.replicas import Replicas, Retention
from fedone_sdk.aggregator.rounds import RoundMachine, lifecycle, seats
from fedone_sdk.aggregator.runs.changes import Change, Listener
from fedone_sdk.aggregator.runs.run_registry import RunRegistry
from fedone_sdk.aggregator.runs.served_run import ObserveCommit, ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Query, usable_vocabulary
from fedone_sdk.backends.judge import MAX_TOKENS, Judge
from fedone_sdk.backends.model_client import metered
from fedone_sdk.budget import Budget
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.data import check_examples
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import Removal
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import RunDeleted, Store, VersionConflict
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)

_RETURN_TIMEOUT_S = 5.0
"""How long `stop_run(gently=True)` waits for updates of clients that got all scores, seconds."""
_START_TIMEOUT_S = 20.0
"""How long a device's request waits until the server has started, seconds."""

KEEP_ALL = Retention()
"""Ended runs, logs and idle clients are kept for ever."""


class Service:
    """The aggregator without HTTP.

    Args:
        backend: The gateway's model; None if clients query their own models.
        observe_commit: Called with a run's id before each commit of the run; returns a context
            manager, inside which the commit is made.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        authority: Authority,
        backend: LLMBackend | None = None,
        retention: Retention = KEEP_ALL,
        observe_commit: ObserveCommit = nullcontext,
    ) -> None:
        self.authority = authority
        self.access = Access(store=store, authority=authority, clock=clock)
        self.listeners: list[Listener] = []
        self.draining = False
        self._observe_commit = observe_commit
        self.store = store
        self.clock = clock
        self._backend = backend = None if backend is None else metered(backend)
        self._models = calls.ModelChecks(backend)
        self._gateway = None if backend is None else ModelGateway(backend)
        # Run id -> the run's evaluation and proposer.
        self._companions: dict[str, list[calls.Companion]] = {}
        self._loading: asyncio.Task[None] | None = None
        self._adding = asyncio.Lock()
        self._admitting = asyncio.Event()
        self.registry = RunRegistry(
            store=store,
            new_run=self._restored_run,
            check_model=self._models.check,
            on_loaded=lambda run: self.dispatcher.sync_run(run),
            on_removed=self._on_removed,
            must_stay=self._companions.__contains__,
        )
        self.runs = self.registry.served
        self.dispatcher = Dispatcher(
            store=store,
            clock=clock,
            access=self.access,
            registry=self.registry,
            models=self._models,
        )
        self.work = OpenWork(
            store=store,
            registry=self.registry,
            dispatcher=self.dispatcher,
            gateway=self._gateway,
            companions=self._companions,
        )
        self.access.on_revoked.append(self.dispatcher.revoke)
        self.replicas = Replicas(
            store=store,
            clock=clock,
            registry=self.registry,
            dispatcher=self.dispatcher,
            access=self.access,
            retention=retention,
            delete=self._delete,
        )

    async def open(self) -> None:
        """Open the store, and start to load its live runs. If this fails, call `stop`.

        A live run is running, paused or has open work. After this call users' requests can be
        answered: a run that a request names is loaded on demand.
        """
        await self.store.open()
        if isinstance(self.clock, SystemClock):
            self.clock.set(await self.store.now())
        await self.access.open()
        await self.registry.read_heads()
        await self.replicas.start()
        self._loading = asyncio.create_task(self._load_live_runs(), name="loading runs")

    async def wait_until_loaded(self) -> None:
        """Wait until all live runs are loaded and their models are checked."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    def admit_devices(self) -> None:
        """Admit devices; call it after all live runs are loaded or added."""
        self._admitting.set()
        self.replicas.start_sweeps()

    @property
    def starting(self) -> bool:
        """Whether devices are not admitted yet."""
        return not self._admitting.is_set()

    async def wait_until_admitting(self) -> None:
        """Wait until devices are admitted; after a timeout raise ``store_unavailable``."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._admitting.wait()
        except TimeoutError:
            raise ProblemError("store_unavailable", "the server is starting") from None

    async def _load_live_runs(self) -> None:
        await self.registry.load_live()
        await self.replicas.restore()
        self.replicas.watch()
        await self.registry.wait_checked()

    async def stop(self) -> None:
        """Stop background tasks and close the store; runs continue at the next start."""
        self.drain()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.registry.stop()
        for companion in chain(*self._companions.values()):
            await companion.aclose()
        if self._gateway is not None:
            await self._gateway.stop()
        await self.replicas.stop()
        for run in self.runs.values():
            run.ended.set()  # so that `wait` returns
        await wait_pending(self.store)  # Includes the work of callers that were cancelled.
        await self.store.close()

    def drain(self) -> None:
        """Answer polls at once; assign no work. Clients can still send updates for open work."""
        self.draining = True
        self.dispatcher.drain()
        for run in self.runs.values():
            for listener in self.listeners:
                listener(run, Change(reloaded=True))  # Wakes the event streams, so that they end.

    @property
    def trouble(self) -> str | None:
        """Why the gateway's model is unavailable; None if it is available, or there is no model."""
        return None if self._backend is None else self._backend.trouble

    async def add_run(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary | None = None,
        *,
        dev: Sequence[Example] = (),
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
        proposer: LLMBackend | None = None,
    ) -> ServedRun:
        """Add a run, or continue the stored run of the same name; see `Aggregator.add_run`.

        If `spec` has higher caps than the stored run, the stored run gets them.
        """
        check_examples(spec.task, dev, "dev")
        if vocabulary is None:
            vocabulary = await in_thread(spec.prompt.build, spec.task)
        async with self._adding:
            run = await self.registry.get_or_load(spec.name)
            if run is None:
                vocabulary = await usable_vocabulary(self._backend, spec, vocabulary)
                machine = self._models.machine(spec.name, spec, vocabulary)
                machine = await self._models.with_model(machine, vocabulary)
                calls.check_required_model(machine)
                run = self._new_run(machine, vocabulary)
                try:
                    await run.create()
                except RunDeleted as exc:
                    raise SpecError(
                        f"name: {spec.name!r} is the name of a deleted run; use another name"
                    ) from exc
                except ValueError:  # Another replica has added the run first.
                    run = await self.registry.get_or_load(spec.name)
                    if run is None:
                        raise
                else:
                    # A refresh of the registry may have loaded the run in the meantime.
                    run = self.runs.setdefault(run.run_id, run)
                    await signals.publish(self.store, signals.RunsChanged())
            if not run.spec.is_same_run(spec) or not run.initial_vocabulary.comes_from(vocabulary):
                changed = ", ".join(run.spec.differences(spec)) or "candidates"
                raise SpecError(
                    f"name: {spec.name!r} is taken by a different run (changed: {changed})"
                )
        if spec.budget not in (run.spec.budget, run.state.account.cap, None):
            try:
                await self.raise_caps(run, spec.budget)
            except ProblemError as exc:
                raise SpecError(f"budget: {exc.detail}") from exc
        added: list[calls.Companion] = []
        kinds = set(map(type, self._companions.get(run.run_id, ())))
        if dev and self._backend is not None and Evaluation not in kinds:
            evaluation = Evaluation(
                run, self._backend, dev, score, measure, is_leader=lambda: self.replicas.is_leader
            )
            added.append(evaluation)
        kind = Reflections if spec.prompt.reflects else Proposer
        if proposer is not None and kind not in kinds:
            added.append(kind(run, metered(proposer), model=self._backend))
        for companion in added:
            self._companions.setdefault(run.run_id, []).append(companion)
            companion.on_started()
        self.dispatcher.sync_run(run)
        self.dispatcher.wake()
        return run

    def _restored_run(self, run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> ServedRun:
        return self._new_run(self._models.machine(run_id, spec, vocabulary), vocabulary)

    def _new_run(self, machine: RoundMachine, vocabulary: Vocabulary) -> ServedRun:
        return ServedRun(
            machine,
            vocabulary=vocabulary,
            store=self.store,
            clock=self.clock,
            available=self.dispatcher.available,
            access=self.access,
            listener=self._on_change,
            observe_commit=self._observe_commit,
        )

    async def wait(self, run: ServedRun) -> None:
        """Wait for a run's end, the answers to its model calls, and its final evaluation."""
        await run.ended.wait()
        if self._gateway is not None:
            await self._gateway.wait_idle(run)  # The answers are paid for, and are cached.
        for companion in self._companions.get(run.run_id, ()):
            await companion.wait_idle()  # The cost of the evaluation is part of the result.

    async def query_model(self, run: ServedRun, queries: Sequence[Query]) -> list[Answer]:
        """Query the model outside training; the queries count as evaluation of the run."""
        if self._backend is None:
            raise ProblemError("backend_unavailable", "this server has no model")
        answers = await calls.query_as_evaluation(run, self._backend, queries)
        await run.record_answers(answers)
        return answers

    def charge_judge(self, run: ServedRun, score: ScoreFunction | None) -> ScoreFunction | None:
        """Return `score`; if it is a judge (a model), its calls are charged to the run."""
        if isinstance(score, Judge):
            backend, size = score.backend, run.spec.method.batch_size
            worst = calls.bounded(
                run.spec, lambda: backend.worst_case(1, MAX_TOKENS) * size, "task.score: the judge"
            )
            run.use_machine(run.base.with_grades(worst.without_queries()))
        return calls.charged_to(run, score)

    async def delete_run(self, run: ServedRun, *, dry: bool = False) -> Removal:
        """Delete a run with all its data; its name stays reserved.

        With `dry`, the run stays, and the reply describes what would be deleted.

        Raises:
            ProblemError: ``run_conflict`` if the run is running or paused, or has open work.
        """
        await run.catch_up()
        state = run.state
        if state.running or state.paused:
            raise ProblemError("run_conflict", "the run is running; stop it first")
        if state.seats or state.account.leases or state.evaluation.leases:
            raise ProblemError("run_conflict", "the run has open work; wait until none is open")
        if not dry:
            try:
                await self._delete(run.run_id, run.version)
            except (KeyError, VersionConflict) as exc:
                raise ProblemError("run_conflict", "the run has changed in the meantime") from exc
        return Removal(
            run_id=run.run_id,
            status=state.status,
            spent=state.account.spent,
            ended_at=state.ended_at,
            deleted=not dry,
        )

    async def _delete(self, run_id: str, version: int) -> None:
        await self.store.delete_run(run_id, version, self.clock.now())
        _log.info("run deleted", run_id=run_id)
        await self.registry.remove(run_id)
        await signals.publish(self.store, signals.RunsChanged())

    async def _on_removed(self, run_id: str, run: ServedRun | None) -> None:
        if run is not None:
            self.dispatcher.remove_run(run)
        for companion in self._companions.pop(run_id, ()):
            await companion.aclose()

    async def stop_run(
        self, run: ServedRun, reason: str | None = None, *, gently: bool = False, keep: bool = False
    ) -> None:
        """Stop a run and keep its result.

        With `gently`, pending model calls and the updates that follow them are awaited first, so
        that the actual cost is charged. With `keep`, the round's work stays open for a resume.
        """
        with self.dispatcher.stopping(run):
            if gently:
                await self._wait_for_updates(run)
            if run.state.running or not gently:
                await run.apply(lifecycle.stop, reason=reason, keep=keep)

    async def _wait_for_updates(self, run: ServedRun) -> None:
        if self._gateway is not None:
            await self._gateway.wait_idle(run)
        changed = asyncio.Event()

        def listener(_run: ServedRun, _change: Change) -> None:
            changed.set()

        self.listeners.append(listener)
        try:
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                while run.state.running and any(map(run.state.is_answered, run.state.seats)):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            text = "run stops, but some clients that got all scores have not sent their updates"
            _log.warning(text, run_id=run.run_id)
        finally:
            self.listeners.remove(listener)

    async def resume_run(self, run: ServedRun) -> None:
        """Resume a stopped, paused or failed run with the server's current model.

        Raises:
            ProblemError: ``run_conflict`` if the run is running or has ended for good,
                ``backend_blocked`` or ``backend_unavailable`` if the model is unavailable.
        """
        self._models.reset()
        await run.catch_up()
        if run.state.can_resume:  # Otherwise the handler refuses, and gives the reason.
            await self._models.check_available(run)
        model = run.state.model
        await run.apply(lifecycle.resume)
        if model is not None and run.state.model != model:
            models = {"before": model, "now": run.state.model}
            _log.warning("run resumed with another model", run_id=run.run_id, **models)

    async def raise_caps(self, run: ServedRun, caps: Budget) -> None:
        """Raise caps of a run; a run that ended because its budget was exhausted continues.

        Raises:
            ProblemError: ``run_conflict`` if a cap would be lower or the run cannot continue;
                ``backend_blocked`` or ``backend_unavailable`` as for `resume_run`.
        """
        await run.catch_up()
        if not (run.state.running or run.state.can_resume):
            await self._check_resumable(run)
        await run.apply(lifecycle.raise_caps, caps=caps)

    async def _check_resumable(self, run: ServedRun) -> None:
        if len(run.history) < run.state.round:
            raise ProblemError("run_conflict", "the run cannot continue: its log was removed")
        for name in run.history[-1].client_id.split(",") if run.history else ():
            if await self.store.client_named(name) is None:
                raise ProblemError("run_conflict", "the run's clients are not in this store")
        await self._models.check_available(run)
        before, now = run.state.model, run.base.gateway_model
        if before and now and before != now:
            raise ProblemError(
                "run_conflict", f"the server's model is {now!r}, but the run used {before!r}"
            )

    async def roll_back(self, run: ServedRun, to_round: int, reason: str) -> None:
        """Roll a run back to its state after `to_round` rounds; its spending stays counted.

        Raises:
            ProblemError: ``run_conflict`` if there is no snapshot, or the run has ended for good.
        """
        # Used for round 0. For a later round, `run.apply` takes the method's state from a snapshot.
        initial = run.base.initial_state().method
        await run.apply(lifecycle.roll_back, method=initial, to_round=to_round, reason=reason)

    async def quarantine(self, run: ServedRun, client_id: str, reason: str) -> None:
        """Put a client of a run in quarantine; an unknown client is ``not_found``."""
        client = await self.access.by_name(client_id)
        await run.apply(seats.quarantine, client=client.index, reason=reason)
        _log.warning("client quarantined", run_id=run.run_id, client=client.index, reason=reason)

    async def lift_quarantine(self, run: ServedRun, client_id: str) -> None:
        """Release a client from quarantine; an unknown client is ``not_found``."""
        client = await self.access.by_name(client_id)
        await run.apply(seats.lift_quarantine, client=client.index)
        _log.warning("client released", run_id=run.run_id, client=client.index)

    def _on_change(self, run: ServedRun, change: Change) -> None:
        self.dispatcher.on_change(run, change)
        if self._gateway is not None:
            self._gateway.on_change(run, change)
        self.replicas.on_run_changed(run)
        for companion in self._companions.get(run.run_id, ()):
            companion.on_change(change)
            if change.resumed:
                companion.on_started()
        if change.resumed:
            self._models.reset()  # Another replica may have found that the model works again.
            self.dispatcher.wake()
        for listener in self.listeners:
            listener(run, change)
