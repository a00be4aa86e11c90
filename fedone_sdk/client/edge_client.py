"""The edge client: enrols, claims work, scores prompts on its own data, returns updates."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import structlog

from fedone_sdk import errors
from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.client import options, session
from fedone_sdk.client.device import Device, KnownRuns, Worker
from fedone_sdk.client.noise import PrivacyAccount
from fedone_sdk.client.options import Hooks, RunFit, Turn, WorkPolicy
from fedone_sdk.client.rows import Consent, Data, Source
from fedone_sdk.client.state import DeviceState
from fedone_sdk.client.transport import Idle, Network, server_url, token_of
from fedone_sdk.clock import within
from fedone_sdk.errors import ArgumentError, MessageError, ProblemError, TransportError
from fedone_sdk.files import user_path
from fedone_sdk.messages import Assignment, Claim, Enrol
from fedone_sdk.spec.base import check_kinds, validate_spec
from fedone_sdk.task import Example

_log = structlog.get_logger(__name__)


class EdgeClient:
    """A device that takes part in prompt tuning with its own labelled text.

    Example:
        ```python
        async with EdgeClient("https://fedone.example", token=token, data=examples) as client:
            await client.run_forever()
        ```

    By default the texts of a mini-batch go to the server's gateway; `Hooks.before_send` filters
    them first. Labels are not sent, but the server can compute them from exact losses. A run with
    `privacy` hides labels in noise. If the device has its own `backend`, no text is sent.

    The device declines a run that puts a column outside `fields` into prompts, has another label
    column, or lacks a label of the device's rows. If the `WorkPolicy` requires privacy, the server
    learns neither the reason nor the number of examples.

    A client belongs to one event loop at a time; `stop` may be called from any thread.

    Args:
        data: The examples: an iterable, or a function (plain or async) that is called before each
            claim and returns the current examples.
        label: The label column, ``label`` by default. It stays on the device.
        fields: Columns that a run may put into prompts; None is every column but the label. Rows
            that lack one of these columns take part in no run. If `fields` includes the label
            column, runs with loss ``nll`` may send the labels to the gateway.
        token: Enrolment token, required until the device has enrolled.
        backend: The device's own model; if None, the gateway scores.
        state_dir: Folder for the device's identity, unsent updates and paid losses; None keeps them
            in memory. No other process, and no other client of the server, can use the folder until
            the end of ``async with``.

    Raises:
        DataError: `data` is empty, the state folder cannot be created, another process uses it, or
            the spent epsilon in it cannot be read.
        MissingExtraError: `policy` requires privacy, and the extra ``privacy`` is not installed.
        SpecError: An argument cannot be used, or `policy` requires privacy and `label` or `fields`
            is missing.
    """

    def __init__(
        self,
        server: str,
        *,
        data: Data,
        label: str | None = None,
        fields: Collection[str] | None = None,
        token: str | None = None,
        backend: LLMBackend | None = None,
        state_dir: str | Path | None = None,
        policy: WorkPolicy | None = None,
        hooks: Hooks | None = None,
        network: Network | None = None,
    ) -> None:
        check_kinds(
            "arguments",
            label=(label, str | None),
            token=(token, str | None),
            backend=(backend, LLMBackend | None),
            state_dir=(state_dir, str | Path | None),
            policy=(policy, WorkPolicy | None),
            hooks=(hooks, Hooks | None),
            network=(network, Network | None),
        )
        policy, hooks, network = policy or WorkPolicy(), hooks or Hooks(), network or Network()
        claim = {"num_examples": 1, "run_id": policy.run_id, "wait_s": network.wait_s}
        validate_spec(Enrol, {"name": network.name}, source="arguments")
        validate_spec(Claim, claim, source="arguments")
        token = token_of(token)
        self._source = Source(data)
        self._may_fit_more = True  # Whether rows may fit runs that they did not fit before.
        self._has_no_data = False
        self._run_id = policy.run_id
        self._wait_s = network.wait_s
        self._stop = session.StopSignal()
        events = options.EventSink(hooks.on_event)
        # The identity belongs to the server, however the app spells its URL.
        address = str(server_url(server)) if network.transport is None else server
        folder = None if state_dir is None else user_path(state_dir)
        state = DeviceState(folder, address, locks=network.transport is None)
        privacy = None
        if policy.privacy is not None:
            privacy = PrivacyAccount(policy.privacy, state, own_model=backend is not None)
        self._session = session.Session(network, state, token=token, events=events, stop=self._stop)
        self._device = Device(
            state=state,
            session=self._session,
            events=events,
            condition=session.Condition(hooks.only_when, events, self._stop),
            hooks=hooks,
            consent=Consent.of(label, fields, policy.labels, private=privacy is not None),
            backend=backend,
            reflect=policy.reflect,
            budget=options.budget_guard(policy, state.file, backend),
            privacy=privacy,
            # A simulation, which has its own transport, checks the rows of all clients at once.
            logs_fit=network.transport is None,
        )
        self._worker = Worker(self._device)
        self._backoff = session.Backoff()
        # One turn at a time, also if an app calls `run_once` during `run_forever`.
        self._turns = asyncio.Lock()
        # Calls and ``async with`` in progress; the last one closes connections and state folder.
        self._num_users = 0
        state.close()

    @property
    def epsilon(self) -> float | None:
        """The epsilon spent so far; None unless the policy requires privacy."""
        return None if self._device.privacy is None else self._device.privacy.epsilon

    def __repr__(self) -> str:
        state = self._device.state
        return f"EdgeClient({state.server!r}, client_id={state.identity.client_id!r})"

    async def __aenter__(self) -> Self:
        self._num_users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._device.state.release()
            await self._session.transport.aclose()

    async def run_forever(self) -> None:
        """Work until the aggregator's runs have ended, or `stop` is called; outages are retried.

        Raises:
            DataError: Another client uses the state folder.
            ProblemError: The aggregator refuses this device or its version.
            SpecError: The device has not enrolled, and has no token.
        """
        with self._stop.scope():
            async with self:
                while not self._stop.is_set():
                    turn = await self.run_once()
                    if turn.outcome == "ended":
                        return
                    await self._stop.sleep(turn.next_turn_s)

    async def run_for(self, seconds: float) -> None:
        """Work for a limited time, such as the time that a mobile system gives to an app.

        At the limit, work in progress is cancelled. The next call continues the work from the state
        folder. Plain functions of the app cannot be cancelled, so they should return immediately.

        Raises:
            ArgumentError: The time is negative or not a number. Other errors: see `run_forever`.
        """
        if not seconds >= 0:
            raise ArgumentError(f"seconds: must be at least 0, not {seconds!r}")
        grace_s = min(1.0, seconds / 10)
        with suppress(TimeoutError):
            await within(self.run_forever(), seconds - grace_s, grace_s=grace_s)

    def stop(self) -> None:
        """Make `run_forever` return after the work in progress; may be called from any thread.

        `run_forever` can be called again afterwards. If nothing is running, `stop` applies to the
        next call: `run_forever` returns immediately, and `run_once` does not wait for work.
        """
        self._stop.set()

    async def run_once(self) -> Turn:
        """Send unsent updates, claim work once, and do the work. Errors: see `run_forever`."""
        with self._stop.scope():
            async with self, self._turns:
                try:
                    turn = await self._turn()
                except session.Paused:
                    turn = Turn(outcome="paused")
                except (TransportError, MessageError, ProblemError) as exc:
                    turn = self._failed(exc)
                finally:
                    if self._device.privacy is not None:
                        self._device.privacy.update()
                    # Closed between turns, so that a process with many clients has few open files,
                    # and SQLite deletes its log (WAL).
                    self._device.state.close()
        if turn.outcome in ("declined", "refused"):
            turn = replace(turn, next_turn_s=self._backoff.next_s())
        if turn.outcome == "ended":
            self._device.events.emit("ended", run_id=self._run_id)
        return turn

    def _failed(self, exc: errors.FedOneError) -> Turn:
        """Return the result of a turn that ended with a failed call; raise a permanent failure."""
        if isinstance(exc, ProblemError) and not errors.is_retryable(exc):
            if exc.code == "run_ended":
                return Turn(outcome="ended", run_id=self._run_id)
            if exc.code != "unauthorized" or not self._session.may_enrol_again:
                raise exc
            # The server has lost its clients or revoked this one.
            _log.warning("the server does not know this device any more")
            self._device.state.clear()
            self._worker.forget()
            return Turn(outcome="idle", next_turn_s=self._backoff.next_s())
        # An answer that is not the server's, such as a captive portal's, also means offline.
        self._session.set_offline(exc)
        wait_s = self._backoff.next_s(session.retry_after_s(exc))
        return Turn(outcome="offline", next_turn_s=wait_s)

    async def _turn(self) -> Turn:
        # `stop` cancels only what can take long: the app's functions, and a claim.
        if not await self._stop.cancel_on(self._device.condition.holds()):
            return Turn(outcome="paused", next_turn_s=session.CONDITION_POLL_S)
        await self._session.enrol()
        await self._worker.send_unsent()
        try:
            rows = await self._stop.cancel_on(self._source.rows())
        except Exception as exc:
            # The text of an app's exception may quote private data.
            reason = str(exc) if isinstance(exc, errors.FedOneError) else type(exc).__name__
            _log.error("the rows cannot be read", reason=reason)
            return Turn(outcome="idle", next_turn_s=self._backoff.next_s())
        if rows is None:
            return Turn(outcome="idle")
        if not rows:
            if not self._has_no_data:
                _log.warning("data: this client has no examples now; it needs at least one")
            self._has_no_data = True
            return Turn(outcome="idle", next_turn_s=self._wait_s)
        self._has_no_data = False
        self._may_fit_more |= self._worker.fits_more(rows)
        claimed = await self._claim(rows)
        if isinstance(claimed, Turn):
            return claimed
        turn = await self._worker.work(claimed, rows)
        if turn.outcome == "worked":
            self._backoff.reset()
        return turn

    async def _claim(self, rows: Sequence[Example]) -> Assignment | Turn:
        message = Claim(
            num_examples=len(rows) if self._device.privacy is None else 1,
            # The first poll after an outage does not wait, so that `online` is reported at once.
            wait_s=0.0 if self._session.offline_since else self._wait_s,
            run_id=self._run_id,
            own_model=self._device.backend is not None,
            changed=self._may_fit_more,
        )
        self._device.events.emit("waiting", run_id=self._run_id)
        call = self._session.call(self._session.transport.claim, message)
        claimed = await self._stop.cancel_on(call)
        if claimed is None:
            return Turn(outcome="idle")
        self._may_fit_more = False
        if isinstance(claimed, Idle):
            self._backoff.reset()
            wait_s = min(claimed.retry_after_s, session.MAX_WAIT_S)
            self._device.events.emit("waiting", run_id=self._run_id, retry_after_s=wait_s)
            return Turn(outcome="idle", next_turn_s=wait_s)
        return claimed

    async def enrol(self) -> None:
        """Enrol the device unless it has enrolled; `run_once` does this too.

        Raises:
            ProblemError: The token is not valid.
            SpecError: The device has not enrolled, and has no token.
            TransportError: The aggregator cannot be reached.
        """
        async with self, self._turns:
            await self._session.enrol()

    async def rotate_credential(self) -> None:
        """Replace the device's credential; the old one is valid until the new one is used.

        Raises:
            ProblemError: The aggregator refuses.
            TransportError: The aggregator cannot be reached.
        """
        async with self, self._turns:
            await self._session.enrol()
            await self._session.rotate()

    async def check(self) -> tuple[RunFit, ...]:
        """Return how many of this device's rows fit each running run.

        Enrols the device if necessary, and checks its own model. Claims no work, sends no query.

        Example:
            ```python
            for fit in await client.check():
                print(fit)  # urgency: 0 of 200, because field 'label' is 'billing', not one of: ...
            ```

        Raises:
            BackendError: The device's own model is not available, or cannot do a run's task.
            DataError: The rows cannot be read.
            ProblemError: The aggregator refuses this device, or there is no such run.
            SpecError: The device has not enrolled, and has no token.
            TransportError: The aggregator cannot be reached.
        """
        async with self, self._turns:
            await self._session.enrol()
            rows = await self._source.rows()
            listed = await self._session.call(self._session.transport.runs)
            listed = [run for run in listed if self._run_id in (None, run.run_id)]
            if not listed and self._run_id is not None:
                raise ProblemError("not_found", f"there is no run {self._run_id!r} for this device")
            runs = KnownRuns(self._device)
            running = [run.run_id for run in listed if run.status == "running"]
            return tuple([await runs.fit(run_id, rows) for run_id in running])
