"""What a run would cost, found without asking the model anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, field_serializer

from fedone_sdk.aggregator.evaluation import curve_examples
from fedone_sdk.aggregator.service import check_caps
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import (
    LLMBackend,
    Query,
    Show,
    prediction_queries,
    query_for,
    shown_by,
    usable_vocabulary,
)
from fedone_sdk.backends.wrappers import Wrapper
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.calibration import CONTENT_FREE
from fedone_sdk.candidates import label_checks, no_prompt, prompt_of
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, SpecError
from fedone_sdk.messages import Cap, LossesAssignment, Message
from fedone_sdk.messages.bill import Bill, bill
from fedone_sdk.simulation.duration import Duration, by_limits, by_probe
from fedone_sdk.simulation.federation import Federation
from fedone_sdk.simulation.first_work import Exchange, alone, first_work, planned_machine
from fedone_sdk.simulation.longest import LongestTokens, longest_tokens
from fedone_sdk.simulation.probe import Probe, probe_run
from fedone_sdk.simulation.traffic import ExchangePlan, exchange_plan
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import Example, TextPrompt, references_of

__all__ = ["EvaluationPlan", "RunPlan", "plan_run"]

_EXCHANGES: tuple[Exchange, ...] = ("alpha", "losses")

_DRAWS = 32
"""Draws of prompts that the share of distinct ones is averaged over."""

_SAMPLE = 128
"""Queries whose tokens are counted: of the run's rounds, and of each measurement."""

_ONE = Usage(queries=1, requests=1)
"""A query of which no more is known."""

_EXACT = ("cross_entropy", "hinge")
"""Losses that need the log-probability of every label."""


class EvaluationPlan(Message):
    """Queries of evaluation, if all its caps allow them.

    Attributes:
        no_prompt: For no prompt.
        before: For the untrained prompt.
        curve: For all points of the curve.
        after: For the tuned prompt.
        queries: All together.
    """

    no_prompt: int
    before: int
    curve: int
    after: int
    queries: int


class RunPlan(Message):
    """The plan of a run. What is expected is as good as its sample; what is worst holds.

    Attributes:
        name: The run.
        cap: Its caps.
        clients: K.
        vocab_size: N as found.
        queries_per_round: K* x I x E.
        rounds: T as asked.
        rounds_affordable: Full rounds that the caps pay for, at worst case, T at most.
        rounds_expected: Full rounds that the caps are expected to pay for, T at most.
        training_queries: At most.
        distinct_share: Expected share of prompts that are not asked twice on one mini-batch.
        evaluation: Queries of evaluation.
        per_query: What a query is expected to spend: a sample of prompts and mini-batches of the
            run's own data, counted as the backend counts (at most, where it cannot tokenise).
        worst: The most that all of it may spend, as leases count it: every query at the most that
            the backend can bound any query of its size by. Caps are compared with this.
        most: The most that all of it may spend with the run's own data: of a local model, the
            longest rows of a client with the longest candidates in every query of training, and
            all rows of the dev split with these candidates. Of another one as `worst`.
        expected: What all of it is expected to spend after equal queries were merged.
        smallest_cap: The smallest caps that still pay for one round and evaluation.
        duration: How long it takes; null where neither a probe nor a rate limit says so.
        censoring: Whether log-probabilities of labels are ``exact``, or ``unknown``: the provider
            shows only the likeliest tokens, and which labels that leaves out is seen by asking.
        exchanges: Bytes in either exchange.
        sufficient: Whether the caps pay for all rounds at worst case.
        warnings: What deserves a second look.
        priced: Whether the model's price is known; else `usd` is null in JSON.
    """

    name: str
    cap: Cap
    clients: int
    vocab_size: int
    queries_per_round: int
    rounds: int
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


async def plan_run(
    federation: Federation,
    *,
    backend: LLMBackend,
    probe: bool = False,
    transport: Literal["http", "memory"] = "http",
    startup_s: float = 0.0,
) -> RunPlan:
    """Works out what a run would cost.

    A model that cannot be asked now is a warning: what does without it is planned all the same.

    Args:
        federation: The run and its data.
        backend: The model. It is looked at, and counts tokens; only in a probe it answers. The
            weights of a local one are not loaded without a probe.
        probe: Whether a local model is timed on the first rounds of the run, for some seconds. Its
            wrappers take no part: no cache and no cassette is written.
        transport: How messages travel in the run; for the probe.
        startup_s: Seconds that a run of its own process takes until here; part of the duration.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
        SpecError: The method's settings do not fit each other, or it asks nothing in training.
    """
    spec = federation.spec
    if spec.method.domain == "parameters":
        raise SpecError(f"method: {spec.method.name} is trained by clients and asks no queries")
    method, participation = spec.method, spec.participation
    per_round = participation.clients_per_round * method.num_samples * method.local_steps
    adapter = backend.innermost if isinstance(backend, Wrapper) else backend
    timed: Probe | None = None
    if adapter.local and probe:
        timed = await probe_run(federation, adapter, transport=transport)
    costs, troubles = await _costs(federation, backend, adapter)
    if timed is not None and timed.failure is not None:
        troubles.append(f"backend: the probe failed: {timed.failure}")
    query, sample = costs.worst, costs.query

    cap = spec.budget.queries if spec.budget else None
    training = spec.rounds * per_round if cap is None else min(cap, spec.rounds * per_round)
    # Rounds near the end go on with fewer prompts.
    rounds = math.ceil(training / per_round)
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
        },
        sufficient=affordable >= spec.rounds,
        warnings=(*troubles, *_warnings(federation, per_round, affordable, evaluation)),
        priced="usd" in backend.bounds,
    )


def _evaluation(federation: Federation, *, rounds: int) -> EvaluationPlan:
    spec, size = federation.spec, federation.spec.method.batch_size
    if not federation.dev:
        return EvaluationPlan(no_prompt=0, before=0, curve=0, after=0, queries=0)
    # What has no content is asked about in a query of its own.
    more = int(spec.calibration.kind == "contextual")
    whole = math.ceil(len(federation.dev) / size) + more
    every, examples = spec.evaluation.every, min(spec.evaluation.examples, len(federation.dev))
    curve = rounds // every * (math.ceil(examples / size) + more) if every else 0
    return EvaluationPlan(
        no_prompt=whole, before=whole, curve=curve, after=whole, queries=3 * whole + curve
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What things cost.

    Attributes:
        model: The model's fingerprint.
        worst: A query at most.
        worst_measured: A query of evaluation at most.
        query: A query of training on average.
        no_prompt: The dev split without a prompt.
        whole: The dev split with the untrained prompt.
        point: A point of the curve with the untrained prompt.
        longest: Tokens of the longest rows and candidates; None where they are not counted here.
    """

    model: str = "unknown"
    worst: Usage = _ONE
    worst_measured: Usage = _ONE
    query: Usage = _ONE
    no_prompt: Usage = NOTHING
    whole: Usage = NOTHING
    point: Usage = NOTHING
    longest: LongestTokens | None = None


async def _costs(
    federation: Federation, backend: LLMBackend, adapter: LLMBackend
) -> tuple[_Costs, list[str]]:
    """Counts what queries cost, and says what is in the way of the run."""
    spec, size, troubles = federation.spec, federation.spec.method.batch_size, list[str]()
    try:
        vocabulary = await usable_vocabulary(backend, spec, federation.vocabulary)
        federation = replace(federation, vocabulary=vocabulary)
        if not adapter.local:  # A local one is loaded for that, and counting checks the words too.
            for words, form in label_checks(spec.task, vocabulary):
                await backend.check(words, form)
    except (BackendBlocked, BackendUnavailable) as exc:
        troubles.append(f"backend: {exc}")
    try:
        check_caps(spec, backend.bounds)
    except SpecError as exc:
        troubles.extend(exc.problems)

    async def measured(prompt: TextPrompt | SoftPrompt, examples: Sequence[Example]) -> Usage:
        calibration = spec.calibration.label_free
        return await _quoted(
            backend, prediction_queries(backend, spec.task, prompt, examples, size, calibration)
        )

    show = await shown_by(
        spec.method,
        prompt_len=spec.prompt.length,
        task=spec.task,
        vocabulary=federation.vocabulary,
        backend=backend,
    )
    method = planned_machine(federation, spec, "").method
    untrained = show(method.prompt(method.init()).tolist())
    queries = _sample(federation, backend, show)
    largest = max(size, len(CONTENT_FREE)) if spec.calibration.kind == "contextual" else size
    try:
        total = await _quoted(backend, queries)
        costs = _Costs(
            model=backend.fingerprint,
            worst=backend.worst_case(size, spec.task.max_written),
            worst_measured=backend.worst_case(largest, spec.task.max_written),
            query=_share(total, 1, len(queries)),
            no_prompt=await measured(no_prompt(spec.task, federation.vocabulary), federation.dev),
            whole=await measured(untrained, federation.dev),
            point=await measured(untrained, curve_examples(spec, federation.dev)),
            longest=await longest_tokens(federation, adapter, untrained) if adapter.local else None,
        )
    except BackendError:
        if not troubles:
            raise
        # The trouble is told; it also keeps from counting.
        troubles.append("backend: without it tokens and money cannot be counted")
        return _Costs(), troubles
    return costs, troubles


async def _quoted(backend: LLMBackend, queries: Sequence[Query]) -> Usage:
    """What queries are expected to spend; of many, some are counted for all."""
    picked = queries[:: math.ceil(len(queries) / _SAMPLE) or 1]
    total = sum([await backend.quote(query) for query in picked], NOTHING)
    return _share(total, len(queries), len(picked)) if picked else NOTHING


def _share(total: Usage, part: int, whole: int) -> Usage:
    return Usage(
        queries=math.ceil(total.queries * part / whole),
        requests=math.ceil(total.requests * part / whole),
        prompt_tokens=math.ceil(total.prompt_tokens * part / whole),
        completion_tokens=math.ceil(total.completion_tokens * part / whole),
        usd=total.usd * part / whole,
    )


def _sample(federation: Federation, backend: LLMBackend, show: Show) -> list[Query]:
    """Queries of rounds of the run, on the clients and mini-batches that it will draw.

    The prompts are those of an alpha that has learnt nothing yet.
    """
    machine = planned_machine(federation, alone(federation.spec, "losses"), "")
    queries = []
    for number in range(_SAMPLE):
        round_number = number * federation.spec.rounds // _SAMPLE
        state, assignment = first_work(federation, machine, round_number)
        shard = federation.shards[state.seats[0].client]
        assert isinstance(assignment, LossesAssignment)
        drawn = machine.candidates(state, state.seats[0]).prompts.tolist()
        batch = [
            shard[row]
            for row in draw_minibatch(
                len(shard), federation.spec.method.batch_size, assignment.minibatch_seed
            )
        ]
        task = federation.spec.task
        query = query_for(
            task,
            show(drawn[number % len(drawn)]),
            batch,
            backend=backend,
            references=references_of(task, batch),
        )
        queries.append(query)
    return queries


def _distinct_share(federation: Federation) -> float:
    """How many of the prompts that are drawn at a time differ, before anything was learnt.

    Later there are fewer: as alpha concentrates, more of them are equal.
    """
    if federation.spec.method.domain != "tokens":
        return 1.0  # Vectors hardly ever meet.
    machine = planned_machine(federation, federation.spec, "")
    state, count = machine.algorithm.init(), federation.spec.method.num_samples
    distinct = 0
    for draw in range(_DRAWS):
        rng = stream(stream_seed(federation.spec.seed, "plan", draw))
        indices = machine.algorithm.ask(state, rng, count).prompts
        # By text: a blank candidate makes one text of several draws.
        task, vocabulary = federation.spec.task, federation.vocabulary
        distinct += len({prompt_of(task, vocabulary, row) for row in indices.tolist()})
    return distinct / (_DRAWS * count)


def _warnings(
    federation: Federation, per_round: int, affordable: int, evaluation: EvaluationPlan
) -> list[str]:
    spec, found = federation.spec, []
    size, smallest = spec.method.batch_size, min(map(len, federation.shards))
    wanted = None if spec.prompt.vocabulary is None else spec.prompt.vocabulary.size
    if spec.budget is None:
        found.append("budget: no cap is set")
    if not affordable:
        found.append(f"budget: cannot pay one round of {per_round} queries at worst case")
    elif affordable < spec.rounds:
        found.append(f"budget: pays {affordable} of {spec.rounds} rounds at worst case")
    limit = spec.evaluation.queries
    if limit is not None and limit < evaluation.queries:
        found.append(f"evaluation.queries: {limit} of {evaluation.queries} that it would take")
    needed = spec.participation.min_clients
    if needed is not None and needed > len(federation.shards):
        found.append(
            f"participation.min_clients: {needed} are waited for, there are only "
            f"{len(federation.shards)} clients"
        )
    if not federation.dev:
        found.append("data.dev: is missing, so nothing will be measured")
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
