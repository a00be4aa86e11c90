"""What operators do with a run: stop, resume, raise caps, roll back, quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from fedone_sdk.aggregator.access.clients import Access
from fedone_sdk.aggregator.dispatch.dispatcher import Dispatcher
from fedone_sdk.aggregator.model.calls import ModelChecks
from fedone_sdk.aggregator.model.gateway import ModelGateway
from fedone_sdk.aggregator.rounds.lifecycle import raise_caps, resume, roll_back, stop
from fedone_sdk.aggregator.rounds.seats import lift_quarantine, quarantine
from fedone_sdk.aggregator.runs.changes import Change, Listener
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError
from fedone_sdk.stores import Store

_log = structlog.get_logger(__name__)

_RETURN_TIMEOUT_S = 5.0
"""Maximal wait for updates whose queries are answered, when a run stops gently, seconds."""


@dataclass(kw_only=True, eq=False)
class Steering:
    """Operations of operators on the runs of a service."""

    store: Store
    access: Access
    dispatcher: Dispatcher
    models: ModelChecks
    gateway: ModelGateway | None
    listeners: list[Listener]
    restart: Callable[[ServedRun], None]

    async def stop(
        self, run: ServedRun, reason: str | None = None, *, gently: bool = False, keep: bool = False
    ) -> None:
        """Stop a run and keep its result.

        `gently` first waits for pending calls and their updates, so that leases are settled with
        their actual cost. `keep` keeps the open work of the round, with its leases, for a resume.
        """
        with self.dispatcher.closing(run):
            if gently:
                await self._wait_for_updates(run)
            if run.state.running or not gently:
                await run.apply(stop, reason=reason, keep=keep)

    async def _wait_for_updates(self, run: ServedRun) -> None:
        """Wait until pending calls have ended and answered work is returned."""
        if self.gateway is not None:
            await self.gateway.wait_idle(run)
        news = asyncio.Event()

        def listener(of: ServedRun, change: Change) -> None:
            news.set()

        self.listeners.append(listener)
        try:
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                while run.state.running and any(map(run.state.is_answered, run.state.seats)):
                    news.clear()
                    await news.wait()
        except TimeoutError:
            _log.warning("answered work was not returned", run_id=run.run_id)
        finally:
            self.listeners.remove(listener)

    async def resume(self, run: ServedRun) -> None:
        """Resume a stopped run, with the current model.

        Raises:
            ProblemError: ``run_conflict`` if it is running or has ended for good,
                ``backend_blocked`` or ``backend_unavailable`` if the model is unavailable.
        """
        self.models.reset()
        await run.catch_up()
        if run.state.can_resume:  # Else the machine refuses with the reason.
            await self.models.check_available(run)
        model = run.state.model
        await run.apply(resume)
        if model is not None and run.state.model != model:
            _log.warning(
                "run resumed with another model",
                run_id=run.run_id,
                before=model,
                now=run.state.model,
            )
        self.restart(run)

    async def raise_caps(self, run: ServedRun, caps: Budget) -> None:
        """Raise caps of a run; a run with an exhausted budget continues.

        Raises:
            ProblemError: ``run_conflict`` if a cap would not be higher or the run cannot continue;
                ``backend_blocked`` or ``backend_unavailable`` if it would continue and the model is
                unavailable.
        """
        await run.catch_up()
        ended = not (run.state.running or run.state.can_resume)
        if ended:
            await self._check_resumable(run)
        await run.apply(raise_caps, caps=caps)
        if ended:
            self.restart(run)

    async def _check_resumable(self, run: ServedRun) -> None:
        """Refuse to continue an ended run whose log, clients or model are missing."""
        if len(run.history) < run.state.round:
            raise ProblemError("run_conflict", "the log of the run was removed: it cannot continue")
        for name in run.history[-1].client_id.split(",") if run.history else ():
            if await self.store.client_named(name) is None:
                raise ProblemError("run_conflict", "the clients of the run are in another store")
        await self.models.check_available(run)
        before, now = run.state.model, run.base.gateway_model
        if before and now and before != now:
            raise ProblemError(
                "run_conflict", f"the server's model is {now!r}, the run was scored by {before!r}"
            )

    async def roll_back(self, run: ServedRun, to_round: int, reason: str) -> None:
        """Roll a run back to its state after `to_round` rounds; its spending stays counted.

        Raises:
            ProblemError: ``run_conflict`` if it has done fewer rounds, has no snapshot of that
                round, or has ended for good.
        """
        # The run replaces the method's state by that of the snapshot, unless it goes to the start.
        start = run.base.initial_state().method
        await run.apply(roll_back, method=start, to_round=to_round, reason=reason)

    async def quarantine(self, run: ServedRun, client_id: str, reason: str) -> None:
        """Put a client of a run in quarantine. Unknown: ``not_found``."""
        client = await self.access.by_name(client_id)
        await run.apply(quarantine, client=client.index, reason=reason)
        _log.warning("client quarantined", run_id=run.run_id, client=client.index, reason=reason)

    async def release(self, run: ServedRun, client_id: str) -> None:
        """Release a client from quarantine. Unknown: ``not_found``."""
        client = await self.access.by_name(client_id)
        await run.apply(lift_quarantine, client=client.index)
        _log.warning("client released", run_id=run.run_id, client=client.index)
