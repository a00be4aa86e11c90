"""The cost and the duration of a run, estimated from its rows, prices and a short timing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from pydantic import Field, field_serializer

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.serving.evaluation import curve_examples
from fedone_sdk.aggregator.serving.model_checks import check_caps
from fedone_sdk.aggregator.serving.proposer import proposal_query
from fedone_sdk.aggregator.serving.run_view import seeks_cheapest
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import (
    LLMBackend,
    Query,
    Wrapper,
    prediction_queries,
    price_of,
    query_for,
    usable_vocabulary,
)
from fedone_sdk.backends.judge import Judge
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.candidates import ScoredCandidate, label_checks, no_prompt, prompt_of
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, SpecError
from fedone_sdk.local.federation import Federation
from fedone_sdk.local.probe import Duration, timed
from fedone_sdk.messages import Cap, Message
from fedone_sdk.messages.bill import Bill, bill
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Example, TaskSpec, TextPrompt, references_of
from fedone_sdk.vocabulary import CHARS_PER_TOKEN

_ONE = Usage(queries=1, requests=1)
"""The usage of a query without further information."""

_STEPS = 32
"""Steps whose prompts and mini-batches are drawn as the run draws them."""

_MOST_STEPS = 1000
"""Steps whose draws are compared with each other."""

_QUOTED = 128
"""Queries whose tokens are counted: of the steps, and of each measurement."""


class EvaluationPlan(Message):
    """Evaluation queries, if all caps allow them.

    Attributes:
        cheapest: At most: the search may know no shorter prompt that may be as good.
    """

    no_prompt: int
    before: int
    curve: int
    after: int
    cheapest: int
    queries: int


class RunPlan(Message):
    """The plan of a run. Expectations come from a sample; the others are bounds.

    Attributes:
        clients: K.
        vocab_size: N of the vocabulary as built.
        queries_per_round: K* x I x E.
        rounds_planned: Rounds that the method plans with. A search plans with what the cap on
            queries pays, all else with T.
        rounds_affordable: Full rounds that the caps cover if each query costs what its lease
            reserves, at most T.
        rounds_expected: Full rounds that the caps are expected to cover, at most T.
        distinct_share: Expected share of the training's (prompt, row) pairs that are asked for; the
            others are repetitions.
        proposals: Calls of the proposer, at most.
        per_query: Expected usage of a training query.
        expected: Expected usage of the whole run, which asks for each (prompt, row) pair once.
        most: Upper bound of the whole run's usage: what leases reserve.
        smallest_cap: The smallest caps that cover one round and evaluation.
        duration: Estimated duration; null without a probe or a rate limit.
        sufficient: Whether the caps cover all planned rounds in the worst case.
        warnings: Likely problems.
        prices: The model's prices, those of its service tier; null if they are not known.
        priced: Whether all prices are known; else `usd` is null in JSON.
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
    proposals: int
    per_query: Usage
    expected: Usage
    most: Usage
    smallest_cap: Usage
    duration: Duration | None
    sufficient: bool
    warnings: tuple[str, ...]
    prices: str | None = None
    priced: bool = Field(default=True, exclude=True)

    @field_serializer("per_query", "expected", "most", "smallest_cap", when_used="json")
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
    proposer: LLMBackend | None = None,
    probe: bool = False,
    startup_s: float = 0.0,
) -> RunPlan:
    """Compute the cost of a run.

    If a model is not available, the plan has a warning and covers the rest.

    Args:
        federation: The run and its data.
        backend: The model. It counts tokens, and answers queries only in a probe. Without a probe,
            the weights of a local model are not loaded.
        proposer: The model of ``prompt.proposer``.
        probe: Whether to time a local model for some seconds, without its client.
        startup_s: Seconds since the process started; added to the duration.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
        SpecError: The method's settings do not fit each other.
    """
    spec, troubles = federation.spec, list[str]()
    adapter = backend.innermost if isinstance(backend, Wrapper) else backend
    federation = await _checked(federation, backend, adapter, troubles)
    per_round, training = queries_per_round(spec), training_queries(spec)
    draws = _drawn(
        federation, backend, math.ceil(training / spec.method.num_samples), apart=adapter.apart
    )
    # A request has one input or many.
    requests = draws.new_rows if adapter.max_inputs == 1 else draws.new_queries
    # Races at the end use fewer prompts per round.
    rounds = math.ceil(training / per_round)
    planned = max(1, training // per_round) if spec.method.pools else spec.rounds
    evaluation = _evaluation(federation, rounds=rounds)
    points = rounds // spec.evaluation.every if spec.evaluation.every else 0
    costs = await _costs(federation, backend, draws.steps, points, troubles)
    proposals = await _proposals(federation, proposer, rounds, troubles)

    trained = _new(costs.query, training, requests, draws.new_rows)
    leased = (costs.leased * evaluation.queries).without_queries()
    each_round = Fraction(1, proposals.every)
    round_most = costs.leased * per_round + _share(proposals.most, each_round)
    round_expected = (
        _new(costs.query, per_round, requests, draws.new_rows)
        + Usage(queries=per_round)
        + _share(proposals.each, each_round)
    )
    affordable = Account(cap=spec.budget, spent=leased).affordable(round_most, spec.rounds)
    measured = Account(cap=spec.budget, spent=costs.measured)
    expected = measured.affordable(round_expected, spec.rounds)
    duration = _by_limits(spec, trained + costs.measured)
    if adapter.local and probe:
        try:
            duration = await _probed(federation, adapter, draws, rounds, points, startup_s)
        except BackendError as exc:
            troubles.append(f"backend: the probe failed: {exc}")
    return RunPlan(
        name=spec.name,
        cap=Cap.of(spec.budget),
        clients=len(federation.shards),
        vocab_size=len(federation.vocabulary),
        queries_per_round=per_round,
        rounds=spec.rounds,
        rounds_planned=planned,
        rounds_affordable=affordable,
        rounds_expected=expected,
        training_queries=training,
        distinct_share=round(float(draws.new_rows), 4),
        evaluation=evaluation,
        proposals=proposals.calls,
        per_query=costs.query,
        expected=trained
        + costs.measured
        + Usage(queries=training)
        + proposals.each * proposals.expected_calls,
        most=costs.leased * training + leased + proposals.most * proposals.calls,
        smallest_cap=round_most + leased,
        duration=duration,
        sufficient=affordable >= planned,
        warnings=(*troubles, *_warnings(federation, per_round, affordable, planned)),
        prices=None if (price := price_of(spec.backend)) is None else price.text,
        priced=all("usd" in model.bounds for model in (backend, proposer) if model is not None),
    )


async def _checked(
    federation: Federation, backend: LLMBackend, adapter: LLMBackend, troubles: list[str]
) -> Federation:
    """Return the federation with the label words that the model takes; note its problems."""
    spec = federation.spec
    try:
        vocabulary = await usable_vocabulary(backend, spec, federation.vocabulary)
        federation = replace(federation, vocabulary=vocabulary)
        if not adapter.local:  # A local model is loaded for this, and counting also checks words.
            for words, form in label_checks(spec.task, vocabulary):
                await backend.check(words, form)
    except (BackendBlocked, BackendUnavailable) as exc:
        troubles.append(f"backend: {exc}")
    try:
        check_caps(spec, backend.bounds)
    except SpecError as exc:
        troubles.extend(exc.problems)
    return federation


async def _probed(
    federation: Federation,
    backend: LLMBackend,
    draws: _Draws,
    rounds: int,
    points: int,
    startup_s: float,
) -> Duration:
    """Return the duration by a timing of the model, which is asked without its client."""
    spec, training = federation.spec, training_queries(federation.spec)
    bare = no_prompt(spec.task, federation.vocabulary)
    size, dev = spec.method.batch_size, len(_distinct(spec.task, federation.dev))
    dev_rows = 3 * dev + points * min(spec.evaluation.examples, dev)
    return await timed(
        backend,
        spec,
        draws.steps,
        warm_up=_query(backend, federation, bare, federation.shards[0][:1]),
        requests=float(training * draws.new_queries + Fraction(dev_rows, size)),
        rows=float(training * draws.new_rows * size + dev_rows),
        rounds=rounds,
        startup_s=startup_s,
    )


def _machine(federation: Federation) -> RoundMachine:
    spec = federation.spec
    try:
        return RoundMachine.of(spec.name, spec, federation.vocabulary)
    except ValueError as exc:
        raise SpecError(f"method: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """The run's draws from the untrained method.

    Attributes:
        steps: The distinct queries of some steps.
        new_queries: Expected share of the queries that have anything to ask.
        new_rows: Expected share of the (prompt, row) pairs that were not asked before. It falls as
            the method prefers few prompts.
    """

    steps: list[list[Query]]
    new_queries: Fraction
    new_rows: Fraction


def _drawn(federation: Federation, backend: LLMBackend, num_steps: int, *, apart: bool) -> _Draws:
    spec, vocabulary = federation.spec, federation.vocabulary
    algorithm, count = _machine(federation).method, spec.method.num_samples
    state = algorithm.init()
    steps: list[list[Query]] = []
    seen = set[object]()
    pairs = new_pairs = new_queries = 0
    num_steps = min(max(num_steps, 1), _MOST_STEPS)
    for number in range(max(num_steps, _STEPS)):
        rng = stream(stream_seed(spec.seed, "plan", number))
        shard = federation.shards[int(rng.integers(len(federation.shards)))]
        rows = draw_minibatch(len(shard), spec.method.batch_size, int(rng.integers(1 << 53)))
        batch = [shard[row] for row in rows]
        drawn = algorithm.ask(state, rng, count).prompts.tolist()
        # Compared by text, because blank candidates give several draws the same text.
        prompts = [prompt_of(spec.task, vocabulary, row) for row in drawn]
        if number < _STEPS:
            distinct = dict.fromkeys(prompts)
            steps.append([_query(backend, federation, prompt, batch) for prompt in distinct])
        together = tuple(_texts(spec.task, row) for row in batch)
        for prompt in prompts if number < num_steps else ():
            asked = {(prompt, row if apart else together) for row in together}
            pairs += len(asked)
            new_pairs += len(asked - seen)
            new_queries += not asked <= seen
            seen |= asked
    return _Draws(
        steps=steps,
        new_queries=Fraction(new_queries, num_steps * count),
        new_rows=Fraction(new_pairs, pairs),
    )


def _texts(task: TaskSpec, row: Example) -> tuple[object, ...]:
    answer = row.get(task.label_field) if task.generates else None
    return (*(row[name] for name in task.fields), answer)


def _distinct(task: TaskSpec, rows: Sequence[Example]) -> Sequence[Example]:
    """Return the rows that differ in what the model is asked."""
    return list({_texts(task, row): row for row in rows}.values())


def _query(
    backend: LLMBackend, federation: Federation, prompt: TextPrompt, rows: Sequence[Example]
) -> Query:
    task = federation.spec.task
    return query_for(task, prompt, rows, backend=backend, references=references_of(task, rows))


def _evaluation(federation: Federation, *, rounds: int) -> EvaluationPlan:
    spec, size = federation.spec, federation.spec.method.batch_size
    if not federation.dev:
        return EvaluationPlan(no_prompt=0, before=0, curve=0, after=0, cheapest=0, queries=0)
    whole = math.ceil(len(federation.dev) / size)
    every, examples = spec.evaluation.every, min(spec.evaluation.examples, len(federation.dev))
    curve = rounds // every * math.ceil(examples / size) if every else 0
    short = whole if seeks_cheapest(spec) else 0
    return EvaluationPlan(
        no_prompt=whole,
        before=whole,
        curve=curve,
        after=whole,
        cheapest=short,
        queries=3 * whole + curve + short,
    )


# Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    leased: Usage = _ONE
    query: Usage = _ONE
    measured: Usage = NOTHING


async def _costs(
    federation: Federation,
    backend: LLMBackend,
    steps: Sequence[Sequence[Query]],
    points: int,
    troubles: list[str],
) -> _Costs:
    spec, method = federation.spec, _machine(federation).method
    task, size = spec.task, spec.method.batch_size
    untrained = prompt_of(task, federation.vocabulary, method.prompt(method.init()).tolist())
    quote = partial(_quoted_rows, backend, task, size=size)
    sample = [query for step in steps for query in step[: _QUOTED // _STEPS]]
    try:
        dev = _distinct(task, federation.dev)
        measured = await quote(no_prompt(task, federation.vocabulary), dev)
        measured += await quote(untrained, dev) * (2 + seeks_cheapest(spec))
        measured += await quote(untrained, curve_examples(spec, dev)) * points
        return _Costs(
            leased=backend.worst_case(size, task.max_written),
            query=await _quoted(backend, sample, 1),
            measured=measured.without_queries(),
        )
    except BackendError:
        if not troubles:
            raise
        # This problem also prevents counting.
        troubles.append("backend: tokens and costs cannot be counted without it")
        return _Costs()


async def _quoted(backend: LLMBackend, queries: Sequence[Query], count: int) -> Usage:
    """Return the quote of `count` queries, of which these are a sample."""
    total = sum([await backend.quote(query) for query in queries], NOTHING)
    return _share(total, Fraction(count, len(queries))) if queries else NOTHING


async def _quoted_rows(
    backend: LLMBackend, task: TaskSpec, prompt: TextPrompt, rows: Sequence[Example], *, size: int
) -> Usage:
    """Return the quote of a prompt on all rows, from a sample of the mini-batches."""
    starts = range(0, len(rows), size)
    picked = starts[:: math.ceil(len(starts) / _QUOTED) or 1]
    queries = [
        query
        for start in picked
        for query in prediction_queries(backend, task, prompt, rows[start : start + size], size)
    ]
    return await _quoted(backend, queries, len(starts))


def _new(query: Usage, count: int, requests: Fraction, rows: Fraction) -> Usage:
    """Return the usage of some queries, given the shares of requests and rows that are new."""
    return _share((query * count).without_queries(), rows, requests)


def _share(total: Usage, share: Fraction, requests: Fraction | None = None) -> Usage:
    """Return a share of a usage; of the requests another one, if given."""
    return Usage(
        queries=math.ceil(total.queries * share),
        requests=math.ceil(total.requests * (share if requests is None else requests)),
        prompt_tokens=math.ceil(total.prompt_tokens * share),
        completion_tokens=math.ceil(total.completion_tokens * share),
        usd=total.usd * share.numerator / share.denominator,
    )


# The proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposals:
    calls: int = 0
    expected_calls: int = 0
    every: int = 1
    each: Usage = NOTHING
    most: Usage = NOTHING


async def _proposals(
    federation: Federation, model: LLMBackend | None, rounds: int, troubles: list[str]
) -> _Proposals:
    spec, proposer = federation.spec, federation.spec.prompt.proposer
    slot = spec.prompt.proposed_slot
    if proposer is None or slot is None:
        return _Proposals()
    if model is None:
        troubles.append("prompt.proposer: its cost is not included")
        return _Proposals()
    calls = (rounds - 1) // proposer.every  # None after the last round.
    candidates = federation.vocabulary.candidates_of(slot)
    shown = [ScoredCandidate(text=text, mean_loss=math.log(2)) for text in candidates]
    query = proposal_query(spec, slot, shown)
    text = proposer.count * (sum(map(len, candidates)) // max(len(candidates), 1))
    written = min(math.ceil(text / CHARS_PER_TOKEN) or 1, proposer.max_tokens)
    try:
        each = await model.quote(replace(query, max_tokens=written))
        most = model.worst_case(1, proposer.max_tokens)
    except BackendError as exc:
        troubles.append(f"prompt.proposer.backend: {exc}")
        return _Proposals(calls=calls)
    return _Proposals(
        calls=calls,
        expected_calls=min(calls, math.ceil(proposer.max_candidates / proposer.count)),
        every=proposer.every,
        each=each.without_queries(),
        most=most.without_queries(),
    )


# Time


def _by_limits(spec: RunSpec, expected: Usage) -> Duration | None:
    limits = getattr(spec.backend, "limits", None)
    if limits is None:
        return None
    tokens = expected.prompt_tokens + expected.completion_tokens
    pairs = (expected.requests, limits.requests_per_minute), (tokens, limits.tokens_per_minute)
    minutes = [amount / limit for amount, limit in pairs if limit is not None]
    return Duration(basis="rate_limits", seconds=round(60 * max(minutes), 1)) if minutes else None


def _warnings(federation: Federation, per_round: int, affordable: int, planned: int) -> list[str]:
    spec, clients = federation.spec, len(federation.shards)
    size, smallest = spec.method.batch_size, min(map(len, federation.shards))
    wanted, found = getattr(spec.prompt.vocabulary, "size", None) or 0, len(federation.vocabulary)
    needed = spec.participation.min_clients or 0
    pays = (
        f"pays {affordable} of {planned} rounds"
        if affordable
        else f"cannot pay one round of {per_round} queries"
    )
    problems = {
        "budget: no cap is set": spec.budget is None,
        f"budget: {pays} at worst case": affordable < max(planned, 1),
        f"participation.min_clients: {needed} are waited for, there are only {clients} clients": (
            needed > clients
        ),
        "task.score: the cost of the judge is not included": isinstance(federation.score, Judge),
        "data.dev: is missing, so the run has no evaluation": not federation.dev,
        f"prompt.vocabulary.size: {wanted} asked, only {found} found": found < wanted,
        "data: clients share rows, there are too few for disjoint shards": federation.reused_rows,
        f"method.batch_size: {size} asked, the smallest client holds {smallest} examples": (
            smallest < size
        ),
    }
    return [problem for problem, holds in problems.items() if holds]
