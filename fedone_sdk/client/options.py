"""What an app sets and receives: options, functions, events, and how its device fits a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Budget
from fedone_sdk.client.rows import BeforeSend
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import Claim, Enrol
from fedone_sdk.spec import validate_spec
from fedone_sdk.spec.sections import RequiredPrivacy
from fedone_sdk.task import ScoreFunction

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard

_log = structlog.get_logger(__name__)

EventKind = Literal[
    "enrolled", "waiting", "assigned", "scored", "updated", "declined", "refused",
    "paused", "resumed", "offline", "online", "ended",
]  # fmt: skip
"""``enrolled``: the device has an identity. ``waiting``: it claims work, or has to wait
`retry_after_s` before the next claim. ``assigned``: it has work. ``scored``: `done` of `total`
prompts have their losses. ``updated``: the server has accepted the update. ``declined``: the device
has declined the work. ``refused``: the server has refused the update. ``paused``: the condition
`only_when` does not hold; ``resumed``: it holds again. ``offline``: the server cannot be reached;
``online``: it can be reached again. ``ended``: there will be no more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvent:
    """One event of a client. It has neither texts nor secrets.

    Attributes:
        round: Its round, from 0.
        done: Prompts of the work that have their losses.
        total: Prompts of the work.
        retry_after_s: Seconds until the next claim.
    """

    kind: EventKind
    run_id: str | None = None
    assignment_id: str | None = None
    round: int | None = None
    done: int | None = None
    total: int | None = None
    reason: str | None = None
    retry_after_s: float | None = None


OnlyWhen = Callable[[], "bool | Awaitable[bool]"]
"""Whether the device may work now. Plain or async."""

OnEvent = Callable[[ClientEvent], object]
"""Receives each event; its result is ignored."""


class EventSink:
    """Passes events to the app, if it takes any, and logs exceptions of its function."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def emit(self, kind: EventKind, **facts: Any) -> None:
        """Report one event."""
        if self._on_event is None:
            return
        try:
            self._on_event(ClientEvent(kind=kind, **facts))
        except Exception as exc:
            # Only the type of an app's exception: its text may quote private data.
            _log.warning("on_event failed", kind=kind, error=type(exc).__name__)


Outcome = Literal["worked", "declined", "refused", "idle", "paused", "offline", "ended"]
"""How a turn ended.

``worked``: an update was accepted. ``declined``: the device returned the work undone. ``refused``:
the update was late or did not fit, or the run scores with another model than the device's.
``idle``: there was no work, or the device has no examples. ``paused``: the condition `only_when`
does not hold. ``offline``: the aggregator could not be reached, or did not answer as one.
``ended``: there will be no more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one turn.

    Attributes:
        next_turn_s: How long to wait before the next turn, seconds: the server's ``Retry-After``
            or the backoff after a failure. 0 after accepted work.
        round: Its round, from 0.
        reason: Why it was declined or refused, for people.
    """

    outcome: Outcome
    next_turn_s: float = 0.0
    run_id: str | None = None
    assignment_id: str | None = None
    round: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The app's own functions that an edge client calls.

    Attributes:
        before_send: Gets every text before it is scored. Returns it, a redacted form, or None to
            hold the example back. Plain or async; an exception holds the example back.
        only_when: Whether the device may work now, for instance while it charges. Called before
            each claim and before each request for scores. Plain or async; an exception counts as
            False. Work in progress waits while its lease can be renewed, and is declined then.
        on_event: Receives a `ClientEvent` for each step of progress, in the client's thread; it
            should return at once. Its exceptions are logged.
        score: ``score(generated, example)`` from 0 to 1, for runs with loss ``score``.
        before_propose: Gets a candidate that a model wrote from the device's rows, before it is
            tried and sent. Returns it, or anything else to hold it back. Plain or async; an
            exception holds it back.
    """

    before_send: BeforeSend | None = None
    only_when: OnlyWhen | None = None
    on_event: OnEvent | None = None
    score: ScoreFunction | None = None
    before_propose: BeforeSend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPolicy:
    """Which work an edge client accepts.

    Attributes:
        run_id: Accepts work of this run only; None accepts work of any run.
        privacy: Declines work with less noise than this, and work that would exceed its
            `max_epsilon`. The count of epsilon is kept in the client's `state_dir` (extra
            ``privacy``). None accepts work without noise.
        budget: Caps of all work of the device, of all runs and servers; work beyond them is
            declined. Without a `backend` only `queries` has a meaning. The count is kept in the
            client's `state_dir`. None is no cap.
        labels: Values of the label column, which a run has to cover; rows with another one take
            part in no run. None is those of the rows: whether a run fits then shows which occur.
        reflect: What may write candidates from rows that a prompt got wrong: a model on the device,
            whose text leaves after filters that are not differential privacy; or ``gateway``, the
            run's model, which reads these rows with their labels. None: nothing may.

    Raises:
        SpecError: `reflect` is neither.
    """

    run_id: str | None = None
    privacy: RequiredPrivacy | None = None
    budget: Budget | None = None
    labels: Collection[str] | None = None
    reflect: LLMBackend | Literal["gateway"] | None = None

    def __post_init__(self) -> None:
        writes = isinstance(self.reflect, LLMBackend) and "text" in self.reflect.answers
        if not writes and self.reflect not in ("gateway", None):
            raise ArgumentError("policy.reflect: must be 'gateway' or a backend that writes text")


def budget_guard(
    budget: Budget | None, folder: str | Path | None, backend: LLMBackend | None
) -> BudgetGuard | None:
    """Return the device's own budget, if any; its count is a file in the state folder.

    Raises:
        SpecError: A cap is in a unit that the device cannot bound.
    """
    if budget is None:
        return None
    # Imported here: few devices need it.
    from fedone_sdk.budget import BudgetGuard, SqliteLedger

    bounded = frozenset({"queries"}) if backend is None else backend.bounds
    for unit in budget.model_dump(exclude_none=True):
        if unit not in bounded:
            names = ", ".join(sorted(bounded))
            raise ArgumentError(f"policy.budget.{unit}: cannot be bounded here; allowed: {names}")
    ledger = None if folder is None else SqliteLedger(Path(folder) / "budget.sqlite3")
    return BudgetGuard(budget, ledger=ledger, name="client")


def check_arguments(*, name: str | None, run_id: str | None, wait_s: float) -> None:
    """Check the arguments that become fields of messages; a turn would fail with them otherwise.

    Raises:
        SpecError: A message cannot carry one of them.
    """
    validate_spec(Enrol, {"name": name}, source="arguments")
    claim = {"num_examples": 1, "run_id": run_id, "wait_s": wait_s}
    validate_spec(Claim, claim, source="arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """How a device fits a run.

    Attributes:
        fit: Rows that fit the run's task; 0 if the device itself does not fit.
        reason: Why not all of them fit, for the device's own people; None if all do.
    """

    run_id: str
    rows: int
    fit: int
    reason: str | None = None

    def __str__(self) -> str:
        because = "" if self.reason is None else f" because {self.reason}"
        return f"{self.run_id} {self.fit} of {self.rows}{because}"
