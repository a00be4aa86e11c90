"""The cost of a comparison's trials, computed without queries to the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import NOTHING, BudgetGuard, Lease, Usage
from fedone_sdk.comparison.trials import Trial
from fedone_sdk.errors import BudgetExhausted
from fedone_sdk.local import plan_run

_UNEQUAL = (
    "budget: caps on requests, tokens and usd count what is sent: a trial gets further with "
    "answers that an earlier one has paid for; budget.queries is the same for all"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The total cost of some trials.

    Attributes:
        trials: Number of trials.
        training_queries: Upper bound.
        evaluation_queries: Upper bound.
        expected: Sum of the trials' expected usage. Answers that trials share are sent once, so the
            actual usage may be less.
        most: Upper bound of the total usage.
        warnings: What prevents a trial, or makes it incomparable.
        priced: Whether the model's price is known.
    """

    trials: int
    training_queries: int
    evaluation_queries: int
    expected: Usage
    most: Usage
    warnings: tuple[str, ...]
    priced: bool


def is_free(backend: LLMBackend, batch_size: int) -> bool:
    """Return whether a model costs no money."""
    return "usd" in backend.bounds and backend.worst_case(batch_size).usd == 0


class TotalGuard(BudgetGuard):
    """A guard for all trials that records the first refusal.

    Attributes:
        refusal: The first reservation that exceeded the budget.
    """

    refusal: BudgetExhausted | None = None

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Reserve like `BudgetGuard.reserve`, and record a refusal."""
        try:
            async with super().reserve(worst) as lease:
                yield lease
        except BudgetExhausted as exc:
            self.refusal = self.refusal or exc
            raise


async def costs_of(trials: Sequence[Trial], backend: LLMBackend) -> Costs:
    """Plan the first trial of each method, and multiply by the number of seeds.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
        SpecError: A method cannot be run with this model.
    """
    training = evaluation = 0
    expected = most = NOTHING
    budget = trials[0].federation.spec.budget if trials else None
    warnings: dict[str, None] = {}
    if budget is not None and budget.model_dump(exclude={"queries"}, exclude_none=True):
        warnings[_UNEQUAL] = None
    for name in dict.fromkeys(trial.entrant.name for trial in trials):
        same = [trial for trial in trials if trial.entrant.name == name]
        entrant, federation = same[0].entrant, same[0].federation
        plan = await plan_run(federation, backend=backend)
        count, queries = len(same), same[0].training_queries
        training += sum(trial.training_queries for trial in same)
        if entrant.kind == "method":
            measured = plan.evaluation.queries
            expected += plan.expected.without_queries() * count
            most += plan.most.without_queries() * count
            # A cap that ends a run early is part of the comparison.
            warnings |= dict.fromkeys(
                f"{name}: {warning}"
                for warning in plan.warnings
                if not (plan.rounds_affordable and warning.startswith("budget: pays"))
            )
        else:
            measured = plan.evaluation.no_prompt
            asked = (queries + measured) * count
            each = backend.worst_case(federation.spec.method.batch_size)
            expected += (plan.per_query * asked).without_queries()
            most += (each * asked).without_queries()
        evaluation += measured * count
    return Costs(
        trials=len(trials),
        training_queries=training,
        evaluation_queries=evaluation,
        expected=expected,
        most=most,
        warnings=tuple(warnings),
        priced="usd" in backend.bounds,
    )
