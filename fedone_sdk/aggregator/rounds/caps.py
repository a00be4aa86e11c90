"""How the caps of a run are raised, and what its method plans under them."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import CapsRaised, RaiseAsked
from fedone_sdk.aggregator.rounds.lifecycle import going_on
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.rounds.transition import Transition
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError

__all__ = ["raised"]


def raised(rules: Rules, event: RaiseAsked, state: RunState, now: float) -> Transition:
    """Raises caps. A run that its budget has ended runs again; a stopped one stays stopped.

    A search that has ended by itself goes on, too, where more queries are planned for it.
    """
    account = state.account
    if account.cap is None:
        raise ProblemError("run_conflict", "the run has no caps")
    try:
        cap = account.cap.raised(event.caps)
    except ValueError as exc:
        raise ProblemError("run_conflict", str(exc)) from exc
    for unit, limit, held in event.caps.pairs(account.held):
        if held > limit:
            raise ProblemError("run_conflict", f"{unit}: {held} are spent or leased already")
    if cap == account.cap:
        return state, ()
    ended = state.status in ("budget_exhausted", "completed", "target_reached")
    if ended and state.status != "budget_exhausted" and not _has_more(rules, state, cap):
        done = f"after {state.round} of {rules.spec.rounds} rounds"
        raise ProblemError(
            "run_conflict",
            f"the run is {state.status} {done}: a higher cap gives it no more work; a run with "
            "more rounds takes another name",
        )
    state = replace(state, account=replace(account, cap=cap))
    if ended:
        state = going_on(rules, state, now)
    record = {
        "round": state.round,
        "cap": {unit: str(value) for unit, value in cap.model_dump(exclude_none=True).items()},
    }
    return state, (CapsRaised(record=record),)


def _has_more(rules: Rules, state: RunState, cap: Budget) -> bool:
    over_itself = state.round < rules.spec.rounds and rules.method.finished(state.method)
    return over_itself and rules.more_asks(cap)
