"""What a caller may read of runs, by role. No other module decides it.

A device reads the names and states of its runs, their tasks, candidates and prompts; only the last
two depend on other devices' rows. A viewer reads reports without the words
of others, because a provider's may quote a text, and a device's may quote a row. An operator reads
everything. All of it is of the runs that the caller's token is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedone_sdk.aggregator.access.tokens import AdminToken
from fedone_sdk.aggregator.routes.context import RequestContext
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.messages import LostWork, RunEntry, RunResult, RunSummary


def listed(service: Service, context: RequestContext) -> Sequence[RunSummary | RunEntry]:
    """Return the caller's runs, in order of creation."""
    found = [one for one in service.registry.summaries if context.may_see(one.run_id)]
    if context.person is None:
        return [one.entry for one in found]
    return [service.with_devices(one) for one in found]


def result_of(service: Service, run: ServedRun, person: AdminToken) -> RunResult:
    """Return the current or final result of a run."""
    result, all_words = run.result(), person.allows("operator")
    if run.state.running:
        devices = service.dispatcher.count_devices(run, reasons=all_words)
        result = result.model_copy(update={"devices": devices})
    if all_words:
        return result
    return result.model_copy(update={"reason": run.state.summary or result.reason})


def lost_work_of(run: ServedRun, person: AdminToken) -> tuple[LostWork, ...]:
    """Return the newest lost assignments of a run, oldest first."""
    if person.allows("operator"):
        return tuple(run.lost)
    return tuple(one.model_copy(update={"said": None}) for one in run.lost)
