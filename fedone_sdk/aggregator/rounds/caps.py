"""Raising the caps of a run."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import CapsRaised, RaiseRequested
from fedone_sdk.aggregator.rounds.lifecycle import run_again
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.rounds.transition import Transition
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError


def raise_caps(rules: Rules, event: RaiseRequested, state: RunState, now: float) -> Transition:
    """Raise caps.

    A run that ended with `budget_exhausted` runs again, and so does a finished search that can use
    more queries. A stopped run stays stopped.
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
    ended = state.status in ("budget_exhausted", "completed")
    if ended and state.status != "budget_exhausted" and not _has_more_queries(rules, state, cap):
        done = f"after {state.round} of {rules.spec.rounds} rounds"
        raise ProblemError(
            "run_conflict",
            f"the run is {state.status} {done}: a higher cap gives it no more work; a run with "
            "more rounds takes another name",
        )
    state = replace(state, account=replace(account, cap=cap))
    if ended:
        state = run_again(rules, state, now)
    record = {
        "round": state.round,
        "cap": {unit: str(value) for unit, value in cap.model_dump(exclude_none=True).items()},
    }
    return state, (CapsRaised(record=record),)


def _has_more_queries(rules: Rules, state: RunState, cap: Budget) -> bool:
    over_itself = state.round < rules.spec.rounds and rules.method.finished(state.method)
    return over_itself and rules.more_asks(cap)
