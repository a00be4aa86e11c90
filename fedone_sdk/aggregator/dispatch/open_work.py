"""Requests of clients about their work: claims, model calls, updates, renewals and declines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from fedone_sdk import messages
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.dispatch.dispatcher import Dispatcher
from fedone_sdk.aggregator.model.calls import Companion
from fedone_sdk.aggregator.model.gateway import ModelGateway
from fedone_sdk.aggregator.model.proposer import Reflections, is_proposable
from fedone_sdk.aggregator.rounds.run_state import Seat
from fedone_sdk.aggregator.rounds.seats import decline, renew
from fedone_sdk.aggregator.rounds.updates import accept
from fedone_sdk.aggregator.runs.run_registry import RunRegistry
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.errors import ProblemError
from fedone_sdk.stores import ClientRecord, ClosedWork, Store

_log = structlog.get_logger(__name__)

_MAX_REASON_CHARS = 200
"""Maximal length of the reason of a client whose data do not fit a run."""


@dataclass(kw_only=True, eq=False)
class OpenWork:
    """Finds the assignment that a client's request is about, and passes the request on."""

    store: Store
    registry: RunRegistry
    dispatcher: Dispatcher
    gateway: ModelGateway | None
    companions: Mapping[str, Sequence[Companion]]

    async def claim(
        self, client: ClientRecord, message: messages.Claim
    ) -> messages.Assignment | RetryLater:
        """Return an assignment, or when to retry; see `Dispatcher.claim`."""
        run = None
        if message.run_id is not None:
            run = await self.registry.run_for(client, message.run_id)
        return await self.dispatcher.claim(client, message, run)

    def traffic_run(
        self, *, run_id: str | None = None, work: tuple[ClientRecord, str] | None = None
    ) -> ServedRun | None:
        """Return the run that counts a message's traffic; None if the run is not known.

        `work` (a client and its assignment's id) or `run_id` names the run. Without a name, it is
        the server's only run.
        """
        seated = None if work is None else self.seat_with(*work)
        if seated is not None:
            return seated[0]
        runs = self.registry.served
        if run_id is None and len(runs) == 1 and not self.registry.stored:
            return next(iter(runs.values()))
        return runs.get(run_id or "")

    async def check_known(self, client: ClientRecord, assignment_id: str) -> None:
        """Refuse an assignment that the client never had; called before the body is read."""
        if await self._find_open(client, assignment_id) is None:
            await self._closed(client, assignment_id)

    async def check_lease(self, client: ClientRecord, body_sha256: str | None = None) -> None:
        """Refuse a model call, before its body is parsed, if the client has no open assignment.

        With `body_sha256`, also refuse a new (not repeated) request if no lease has queries left.

        Raises:
            ProblemError: ``assignment_expired`` or ``lease_exhausted``.
        """
        refusal = self._lease_refusal(client, body_sha256)
        if refusal is not None and self.store.shared:
            # Another replica may have closed the client's work and assigned new work to it.
            await self.registry.refresh()
            refusal = self._lease_refusal(client, body_sha256)
        if refusal is not None:
            raise refusal

    def _lease_refusal(self, client: ClientRecord, body_sha256: str | None) -> ProblemError | None:
        seats = self._working_seats(client)
        if not seats:
            return ProblemError("assignment_expired", "you have no open assignment")
        if body_sha256 is not None and all(
            run.state.is_used_up(seat) and body_sha256 not in seat.calls for run, seat in seats
        ):
            return ProblemError("lease_exhausted", "the lease has no query left")
        return None

    def _working_seats(self, client: ClientRecord) -> list[tuple[ServedRun, Seat]]:
        return [
            (run, seat)
            for run in self.dispatcher.runs_of(client.index)
            for seat in run.state.seats
            if (seat.client, seat.phase) == (client.index, "working")
        ]

    async def update(
        self,
        client: ClientRecord,
        assignment_id: str,
        message: messages.AlphaUpdate | messages.LossesUpdate,
        body_sha256: str,
    ) -> messages.Receipt:
        """Accept a client's update; if it sends the same body again, it gets the same receipt.

        Raises:
            ProblemError: ``assignment_expired``, ``update_conflict``, ``model_mismatch``,
                ``invalid_message`` or ``not_found``.
        """
        seated = await self._find_open(client, assignment_id)
        if seated is not None:
            unfit = not await self._is_fit(seated[0], message)
            try:
                receipt = await seated[0].apply(
                    accept,
                    assignment_id=assignment_id,
                    update=message,
                    body_sha256=body_sha256,
                    unfit=unfit,
                )
            except ValueError as exc:
                raise ProblemError("invalid_message", str(exc)) from exc
            except ProblemError as exc:
                if exc.code != "assignment_expired":
                    raise
                # Another request has closed the assignment, perhaps with the same update.
            else:
                await self.dispatcher.finish_work(client.index)
                return receipt
        closed = await self._closed(client, assignment_id)
        if closed.receipt is None:
            raise ProblemError(
                "assignment_expired", f"assignment {assignment_id} has ended: {closed.outcome}"
            )
        if closed.body_sha256 != body_sha256:
            raise ProblemError(
                "update_conflict", f"another update was accepted for assignment {assignment_id}"
            )
        return messages.Receipt.model_validate_json(closed.receipt)

    async def _is_fit(
        self, run: ServedRun, message: messages.AlphaUpdate | messages.LossesUpdate
    ) -> bool:
        """Whether the text that an update proposes, if any, can become a candidate."""
        if isinstance(message, messages.AlphaUpdate) or message.proposal is None:
            return True
        model = None if self.gateway is None else self.gateway.backend
        return await is_proposable(run, message.proposal.text, model)

    async def renew(self, client: ClientRecord, assignment_id: str) -> messages.Renewal:
        """Restart the deadline of a client's assignment."""
        run, _ = await self.find(client, assignment_id)
        return await run.apply(renew, assignment_id=assignment_id)

    async def decline(
        self, client: ClientRecord, assignment_id: str, message: messages.Decline
    ) -> None:
        """End an assignment that its client declines; another client gets its seat."""
        run, _ = await self.find(client, assignment_id)
        await run.apply(
            decline,
            assignment_id=assignment_id,
            reason=message.reason[:_MAX_REASON_CHARS] if message.unfit else message.reason,
            usage=message.usage,
            unfit=message.unfit,
        )

    async def score(
        self, client: ClientRecord, message: messages.Score, body_sha256: str
    ) -> messages.Scores:
        """Score prompts through the gateway, within the lease of the assignment."""
        run, seat = await self.find(client, message.assignment_id)
        if self.gateway is None:
            raise ProblemError("not_found", "this server has no gateway; score on the device")
        if message.prompts is None:
            await run.prefetch_prompts(seat)  # This replica may not have drawn them yet.
        return await self.gateway.score(run, seat, message, body_sha256)

    async def reflect(self, client: ClientRecord, message: messages.Reflect) -> messages.Reflected:
        """Let the run's proposer write a candidate for the client's assignment."""
        run, seat = await self.find(client, message.assignment_id)
        for companion in self.companions.get(run.run_id, ()):
            if isinstance(companion, Reflections):
                return await companion.reflect(seat, message)
        raise ProblemError("not_found", "the server has no proposer; write the text on the device")

    async def find(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat]:
        """Return the run and the `Seat` of an open assignment, or raise a `ProblemError`."""
        seated = await self._find_open(client, assignment_id)
        if seated is not None:
            return seated
        await self._closed(client, assignment_id)
        raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")

    async def _closed(self, client: ClientRecord, assignment_id: str) -> ClosedWork:
        closed = await self.store.closed(assignment_id)
        if closed is None or closed.client_index != client.index:
            raise ProblemError("not_found", f"you have no assignment {assignment_id}")
        return closed

    def seat_with(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat] | None:
        """Return the run and the `Seat` of a client's open assignment; None if it has ended."""
        for run, seat in self._working_seats(client):
            if seat.assignment_id == assignment_id:
                return run, seat
        return None

    async def _find_open(
        self, client: ClientRecord, assignment_id: str
    ) -> tuple[ServedRun, Seat] | None:
        seated = self.seat_with(client, assignment_id)
        if seated is None and self.store.shared:
            await self.registry.refresh()  # Another replica may have assigned the work just now.
            seated = self.seat_with(client, assignment_id)
        if seated is not None and not seated[0].model_checked.is_set():
            await seated[0].model_checked.wait()
            seated = self.seat_with(client, assignment_id)
        return seated
