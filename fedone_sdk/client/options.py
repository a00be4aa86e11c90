"""The options of an edge client, and the events and results that its app receives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Budget
from fedone_sdk.client.rows import BeforeSend
from fedone_sdk.clock import is_async
from fedone_sdk.errors import ArgumentError
from fedone_sdk.spec.base import check_kinds
from fedone_sdk.spec.sections import RequiredPrivacy
from fedone_sdk.task import ScoreFunction

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard

_log = structlog.get_logger(__name__)

EventKind = Literal[
    "enrolled", "waiting", "assigned", "scored", "updated", "declined", "refused",
    "paused", "resumed", "offline", "online", "ended",
]  # fmt: skip
"""What has happened.

- ``enrolled``: the device has an identity
- ``waiting``: the device claims work, or waits `retry_after_s` before the next claim
- ``assigned``: the device has work
- ``scored``: `done` of `total` prompts have their losses
- ``updated``, ``refused``: the server has accepted the update, or refused it
- ``declined``: the device has declined the work
- ``paused``, ``resumed``: `only_when` is false, or true again
- ``offline``, ``online``: the server is unreachable, or reachable again
- ``ended``: there will be no more work
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvent:
    """One event of a client, without texts and secrets.

    Attributes:
        round: Index of the round, from 0.
        done: Number of prompts that have been scored.
        total: Number of prompts of the assignment.
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
"""A plain or async function, which returns whether the device may work now."""

OnEvent = Callable[[ClientEvent], object]
"""Receives each event; its result is ignored."""


class EventSink:
    """Passes events to the app's function, if there is one, and logs its exceptions."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def emit(self, kind: EventKind, **facts: Any) -> None:
        """Pass one event."""
        if self._on_event is None:
            return
        try:
            self._on_event(ClientEvent(kind=kind, **facts))
        except Exception as exc:
            # Only the type of an app's exception: its text may quote private data.
            _log.warning("on_event failed", kind=kind, error=type(exc).__name__)


Outcome = Literal["worked", "declined", "refused", "idle", "paused", "offline", "ended"]
"""How a turn (one claim, and the work that it got) ended.

- ``worked``: an update was accepted
- ``declined``: the device declined the work
- ``refused``: the server refused the update, which was late, invalid, or from another model
- ``idle``: there was no work, or the device has no examples
- ``paused``: `only_when` is false
- ``offline``: the aggregator could not be reached, or the answer was not an aggregator's
- ``ended``: there will be no more work
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one turn.

    Attributes:
        next_turn_s: Seconds to wait before the next turn: the server's ``Retry-After`` or the
            backoff after a failure; 0 after accepted work.
        round: Index of the round, from 0.
        reason: Why the work was declined or refused, as a text.
    """

    outcome: Outcome
    next_turn_s: float = 0.0
    run_id: str | None = None
    assignment_id: str | None = None
    round: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The app's functions that an edge client calls, plain or async.

    Attributes:
        before_send: Gets every text before it is scored. Returns the text, a redacted form of it,
            or None to hold the example back; an exception holds the example back, too.
        only_when: Returns whether the device may work now, for instance while it charges. Called
            before each claim and each request for scores. An exception counts as False. While it is
            False, work in progress waits, as long as the server renews the work's deadline.
        on_event: A plain function that receives each `ClientEvent`, in the client's thread; it
            should return immediately. Its exceptions are logged.
        score: ``score(generated, example)`` returns a score from 0 to 1, for loss ``score``.
        before_propose: Gets a candidate that a model wrote from the device's rows, before it is
            scored and sent. The candidate is dropped unless the function returns it unchanged.
    """

    before_send: BeforeSend | None = None
    only_when: OnlyWhen | None = None
    on_event: OnEvent | None = None
    score: ScoreFunction | None = None
    before_propose: BeforeSend | None = None

    def __post_init__(self) -> None:
        hooks = {f"hooks.{field.name}": getattr(self, field.name) for field in fields(self)}
        check_kinds("arguments", **{key: (hook, Callable | None) for key, hook in hooks.items()})
        if is_async(self.on_event):
            raise ArgumentError("hooks.on_event: must not be async, because it is not awaited")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPolicy:
    """Which work an edge client accepts.

    Attributes:
        run_id: Accepts work of this run only; None accepts work of any run.
        privacy: Declines work with less noise than this requires, and work that would exceed
            `max_epsilon`. The spent epsilon is stored in the client's `state_dir`. Needs ``pip
            install fedone-sdk[privacy]``. None accepts work without noise.
        budget: Caps on all work of the device, for all runs and servers together; work that would
            exceed them is declined. The usage is stored in the client's `state_dir`. Without a
            `backend` only `queries` can be capped. None is no cap.
        labels: Labels that a run must have; the device declines other runs. Rows with other labels
            take part in no run. With None, all labels of the rows are required. If the device then
            declines a run, the server learns that a row has a label that the run lacks.
        reflect: The model that may write candidates from rows that were answered wrongly: a model
            on the device, ``gateway`` for the run's model, which then reads the rows and labels, or
            None. Candidates that quote a row are dropped; other candidates are sent without noise.

    Raises:
        SpecError: `reflect` is neither a model nor ``gateway``.
    """

    run_id: str | None = None
    privacy: RequiredPrivacy | None = None
    budget: Budget | None = None
    labels: Collection[str] | None = None
    reflect: LLMBackend | Literal["gateway"] | None = None

    def __post_init__(self) -> None:
        privacy, budget = (self.privacy, RequiredPrivacy | None), (self.budget, Budget | None)
        check_kinds("arguments", **{"policy.privacy": privacy, "policy.budget": budget})
        writes_text = isinstance(self.reflect, LLMBackend) and "text" in self.reflect.answers
        if not writes_text and self.reflect not in ("gateway", None):
            raise ArgumentError("policy.reflect: must be 'gateway' or a backend that writes text")


def budget_guard(
    policy: WorkPolicy, state_file: Path | None, backend: LLMBackend | None
) -> BudgetGuard | None:
    """Return the device's budget, counted in a file next to its state; None if it has no caps."""
    budget, reflect = policy.budget, policy.reflect
    if budget is None:
        return None
    from fedone_sdk.budget import BudgetGuard, SqliteLedger

    bounded = frozenset({"queries"}) if backend is None else backend.bounds
    if isinstance(reflect, LLMBackend):
        bounded &= reflect.bounds | {"queries"}
    for unit in budget.model_dump(exclude_none=True):
        if unit not in bounded:
            names = ", ".join(sorted(bounded))
            raise ArgumentError(f"policy.budget.{unit}: this client can only cap {names}")
    file = None if state_file is None else state_file.with_name("budget.sqlite3")
    ledger = None if file is None else SqliteLedger(file)
    return BudgetGuard(budget, ledger=ledger, name="client")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """How many rows of a device fit a run.

    Attributes:
        fit: Number of rows that fit the run; 0 if the device cannot work for the run at all.
        reason: Why not all rows fit, for the device's owner; None if all rows fit.
    """

    run_id: str
    rows: int
    fit: int
    reason: str | None = None

    def __str__(self) -> str:
        because = "" if self.reason is None else f", because {self.reason}"
        return f"{self.run_id}: {self.fit} of {self.rows}{because}"
