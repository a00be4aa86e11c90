"""The cost of a run, computed without queries to the model."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_serializer

from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import (
    LLMBackend,
)
from fedone_sdk.backends.wrappers import Wrapper
from fedone_sdk.budget import Account, Usage
from fedone_sdk.candidates import prompt_of
from fedone_sdk.errors import SpecError
from fedone_sdk.local.federation import Federation
from fedone_sdk.local.probe import Duration, Probe, by_limits, by_probe, probe_run
from fedone_sdk.local.query_costs import query_costs
from fedone_sdk.local.traffic import (
    Exchange,
    ExchangePlan,
    exchange_plan,
    planned_machine,
)
from fedone_sdk.messages import Cap, Message
from fedone_sdk.messages.bill import Bill, bill
from fedone_sdk.spec import RunSpec

_EXCHANGES: tuple[Exchange, ...] = ("alpha", "losses")

_DRAWS = 32
"""Draws of prompts that the share of distinct ones is averaged over."""

_EXACT = ("cross_entropy", "hinge")
"""Losses that need the log-probability of every label."""


class EvaluationPlan(Message):
    """Evaluation queries, if all caps allow them.

    Attributes:
        no_prompt: For no prompt.
        before: For the untrained prompt.
        curve: For all points of the curve.
        after: For the tuned prompt.
        queries: Total.
    """

    no_prompt: int
    before: int
    curve: int
    after: int
    queries: int


class RunPlan(Message):
    """The plan of a run. Expectations come from a sample; worst cases are bounds.

    Attributes:
        name: The run.
        cap: Its caps.
        clients: K.
        vocab_size: N of the vocabulary as built.
        queries_per_round: K* x I x E.
        rounds: T of the run.
        rounds_planned: Rounds that the method plans with. A search in the losses exchange plans
            with what the cap on queries pays, all else with T.
        rounds_affordable: Full rounds that the caps cover in the worst case, at most T.
        rounds_expected: Full rounds that the caps are expected to cover, at most T.
        training_queries: Upper bound.
        distinct_share: Expected share of prompts without repetitions on one mini-batch.
        evaluation: Evaluation queries.
        per_query: Expected usage of a query: a sample of prompts and mini-batches of the run's own
            data, counted by the backend's tokeniser (an upper bound without one).
        worst: Upper bound of the whole run's usage, as leases count it: every query at the
            backend's bound for its size. Caps are compared with this.
        most: Upper bound with the run's own data. For a local model: the longest rows of a client
            with the longest candidates in every training query, and all rows of the dev split with
            these candidates. For other models, `worst`.
        expected: Expected usage of the whole run, with equal queries merged.
        smallest_cap: The smallest caps that cover one round and evaluation.
        duration: Estimated duration; null without a probe or a rate limit.
        censoring: Whether label log-probabilities are ``exact``, or ``unknown``: the provider
            returns only the likeliest tokens, and only queries show which labels are missing.
        exchanges: Bytes in either exchange.
        sufficient: Whether the caps cover all planned rounds in the worst case.
        warnings: Likely problems.
        priced: Whether the model's price is known; else `usd` is null in JSON.
    """

    name: str
    cap: Cap
    clients: int
    vocab_size: int
    queries_per_round: int
    rounds: int
    rounds_planned: int
    rounds_affordable: int
    rounds_expected: int
    training_queries: int
    distinct_share: float
    evaluation: EvaluationPlan
    per_query: Usage
    worst: Usage
    most: Usage
    expected: Usage
    smallest_cap: Usage
    duration: Duration | None
    censoring: Literal["exact", "unknown"]
    exchanges: dict[Exchange, ExchangePlan]
    sufficient: bool
    warnings: tuple[str, ...]
    priced: bool = Field(default=True, exclude=True)

    @field_serializer("per_query", "worst", "most", "expected", "smallest_cap", when_used="json")
    def _bill(self, value: Usage) -> Bill:
        return bill(value, priced=self.priced)


def queries_per_round(spec: RunSpec) -> int:
    """Return the training queries of a round: K* x I x E."""
    method = spec.method
    return spec.participation.clients_per_round * method.num_samples * method.local_steps


def training_queries(spec: RunSpec) -> int:
    """Return the upper bound of a run's training queries."""
    most = spec.rounds * queries_per_round(spec)
    cap = None if spec.budget is None else spec.budget.queries
    return most if cap is None else min(cap, most)


async def plan_run(
    federation: Federation,
    *,
    backend: LLMBackend,
    probe: bool = False,
    transport: Literal["http", "memory"] = "http",
    startup_s: float = 0.0,
) -> RunPlan:
    """Compute the cost of a run.

    If the model is not available, the plan has a warning and covers the rest.

    Args:
        federation: The run and its data.
        backend: The model. It counts tokens, and answers queries only in a probe. Without a probe,
            the weights of a local model are not loaded.
        probe: Whether to time a local model on the run's first rounds, for some seconds, without
            its wrappers: no cache and no cassette is written.
        transport: The run's transport, for the probe.
        startup_s: Seconds since the process started; added to the duration.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
        SpecError: The method's settings do not fit each other.
    """
    spec = federation.spec
    adapter = backend.innermost if isinstance(backend, Wrapper) else backend
    timed: Probe | None = None
    if adapter.local and probe:
        timed = await probe_run(federation, adapter, transport=transport)
    costs, troubles = await query_costs(federation, backend, adapter)
    if timed is not None and timed.failure is not None:
        troubles.append(f"backend: the probe failed: {timed.failure}")
    query, sample = costs.worst, costs.query

    per_round, training = queries_per_round(spec), training_queries(spec)
    # Races at the end use fewer prompts per round.
    rounds = math.ceil(training / per_round)
    adapts = spec.method.pools and spec.participation.exchange == "losses"
    planned = max(1, training // per_round) if adapts else spec.rounds
    evaluation = _evaluation(federation, rounds=rounds)
    points = rounds // spec.evaluation.every if spec.evaluation.every else 0
    held_out = (costs.worst_measured * evaluation.queries).without_queries()
    round_worst = query * per_round
    affordable = Account(cap=spec.budget, spent=held_out).affordable(round_worst, spec.rounds)
    share = _distinct_share(federation)
    asked = math.ceil(training * share)
    measured = (costs.no_prompt + costs.whole * 2 + costs.point * points).without_queries()
    trained = (sample * asked).without_queries()
    expected = trained + measured + Usage(queries=training)
    worst = query * training + held_out
    most = worst
    if costs.longest is not None:
        tokens = costs.longest.total(queries=training, points=points)
        most = worst.model_copy(update={"prompt_tokens": min(tokens, worst.prompt_tokens)})
    per_round_expected = sample.without_queries() * math.ceil(per_round * share)
    return RunPlan(
        name=spec.name,
        cap=Cap.of(spec.budget),
        clients=len(federation.shards),
        vocab_size=len(federation.vocabulary),
        queries_per_round=per_round,
        rounds=spec.rounds,
        rounds_planned=planned,
        rounds_affordable=affordable,
        rounds_expected=Account(cap=spec.budget, spent=measured).affordable(
            per_round_expected + Usage(queries=per_round), spec.rounds
        ),
        training_queries=training,
        distinct_share=round(share, 4),
        evaluation=evaluation,
        per_query=sample,
        worst=worst,
        most=most,
        expected=expected,
        smallest_cap=round_worst + held_out,
        duration=by_limits(spec, expected)
        if timed is None or timed.failure is not None
        else by_probe(
            timed, startup_s=startup_s, training=trained, evaluation=measured, rounds=rounds
        ),
        censoring="unknown" if backend.censors and spec.task.loss in _EXACT else "exact",
        exchanges={
            exchange: exchange_plan(federation, exchange, training, model=costs.model)
            for exchange in _EXCHANGES
            if exchange == "losses" or spec.method.name != "own"  # No device has it.
        },
        sufficient=affordable >= planned,
        warnings=(
            *troubles,
            *_warnings(federation, per_round, affordable, planned, evaluation),
        ),
        priced="usd" in backend.bounds,
    )


def _evaluation(federation: Federation, *, rounds: int) -> EvaluationPlan:
    spec, size = federation.spec, federation.spec.method.batch_size
    if not federation.dev:
        return EvaluationPlan(no_prompt=0, before=0, curve=0, after=0, queries=0)
    # The content-free inputs of a query form a separate query.
    more = int(spec.calibration.kind == "contextual")
    whole = math.ceil(len(federation.dev) / size) + more
    every, examples = spec.evaluation.every, min(spec.evaluation.examples, len(federation.dev))
    curve = rounds // every * (math.ceil(examples / size) + more) if every else 0
    return EvaluationPlan(
        no_prompt=whole, before=whole, curve=curve, after=whole, queries=3 * whole + curve
    )


def _distinct_share(federation: Federation) -> float:
    """Return the share of distinct prompts per ask, for the untrained alpha.

    The share falls during training: as alpha concentrates, more prompts are equal.
    """
    machine = planned_machine(federation, federation.spec, "")
    state, count = machine.method.init(), federation.spec.method.num_samples
    distinct = 0
    for draw in range(_DRAWS):
        rng = stream(stream_seed(federation.spec.seed, "plan", draw))
        indices = machine.method.ask(state, rng, count).prompts
        # Compared by text, because blank candidates give several draws the same text.
        task, vocabulary = federation.spec.task, federation.vocabulary
        distinct += len({prompt_of(task, vocabulary, row) for row in indices.tolist()})
    return distinct / (_DRAWS * count)


def _warnings(
    federation: Federation,
    per_round: int,
    affordable: int,
    planned: int,
    evaluation: EvaluationPlan,
) -> list[str]:
    spec, found = federation.spec, []
    size, smallest = spec.method.batch_size, min(map(len, federation.shards))
    wanted = None if spec.prompt.vocabulary is None else spec.prompt.vocabulary.size
    if spec.budget is None:
        found.append("budget: no cap is set")
    if not affordable:
        found.append(f"budget: cannot pay one round of {per_round} queries at worst case")
    elif affordable < planned:
        found.append(f"budget: pays {affordable} of {planned} rounds at worst case")
    limit = spec.evaluation.queries
    if limit is not None and limit < evaluation.queries:
        found.append(f"evaluation.queries: {limit} of {evaluation.queries} needed")
    needed = spec.participation.min_clients
    if needed is not None and needed > len(federation.shards):
        found.append(
            f"participation.min_clients: {needed} are waited for, there are only "
            f"{len(federation.shards)} clients"
        )
    if not federation.dev:
        found.append("data.dev: is missing, so the run has no evaluation")
    if wanted is not None and len(federation.vocabulary) < wanted:
        found.append(
            f"prompt.vocabulary.size: {wanted} asked, only {len(federation.vocabulary)} found"
        )
    if federation.reused_rows:
        found.append("data: clients share rows, there are too few for disjoint shards")
    if smallest < size:
        found.append(
            f"method.batch_size: {size} asked, the smallest client holds {smallest} examples"
        )
    return found
