"""Estimates of a run's cost and duration, from its rows, prices and a short timing.

A step is one local step of a client: the prompts of one `ask`, on one mini-batch. A quote is an
upper bound on a query's usage, counted from its texts. The plan takes it as the expected usage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction

from pydantic import Field, field_serializer

from fedone_sdk import backends
from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import LLMBackend, Query, Wrapper
from fedone_sdk.backends.judge import MAX_TOKENS, Judge
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.candidates import label_checks, no_prompt, prompt_of, proposals, reflection
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, SpecError
from fedone_sdk.evaluation.outcomes import curve_examples, seeks_cheapest
from fedone_sdk.local.federation import Federation
from fedone_sdk.local.probe import Duration, timed
from fedone_sdk.messages import Cap, Message
from fedone_sdk.messages.run import Bill, bill
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Example, TextPrompt, references_of
from fedone_sdk.vocabulary import CHARS_PER_TOKEN

_UNKNOWN = Usage(queries=1, requests=1)
"""The usage of a query whose tokens cannot be counted."""

_STEPS = 32
"""Number of steps whose queries are quoted and timed."""

_MAX_STEPS = 1000
"""Maximum number of steps from which the share of repeated rows is estimated."""

_QUOTED = 128
"""Maximum number of queries to quote: of all steps together, and of each measurement."""


class RunPlan(Message):
    """The plan of a run. Expected values come from a sample of queries; other costs are bounds.

    Attributes:
        clients: Number of clients, K.
        vocab_size: Number of candidates, N.
        queries_per_round: Clients per round x prompts per step x local steps (K* x I x E).
        rounds_planned: T, the rounds of RUN.yaml; for a method that keeps all answers, the rounds
            that the cap on queries allows.
        rounds_affordable: Full rounds that the caps cover at worst-case cost, at most T.
        rounds_expected: Full rounds that the caps cover at expected cost, at most T.
        distinct_share: Expected share of the (prompt, row) pairs of training that are sent to the
            model. The other pairs occurred before, so their answers are in the cache.
        evaluation_queries: Queries on the dev split, if all caps allow them.
        proposals: Maximum number of calls of the proposer.
        proposer: The part of `expected` for the proposer; null without one.
        judge: The part of `expected` for the judge of ``task.score``; null without one.
        per_query: Expected usage of a training query.
        expected: Expected usage of the whole run, which asks for each (prompt, row) pair once.
        most: Worst-case usage of the whole run: the sum of all reservations.
        smallest_cap: The smallest caps that cover one round and the evaluation.
        duration: The estimated duration; null without a probe or a rate limit.
        sufficient: Whether the caps cover all planned rounds in the worst case.
        prices: The model's prices for its service tier; null if unknown.
        priced: Whether all prices are known. If not, `usd` is null in JSON.
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
    evaluation_queries: int
    proposals: int
    proposer: Usage | None
    judge: Usage | None
    per_query: Usage
    expected: Usage
    most: Usage
    smallest_cap: Usage
    duration: Duration | None
    sufficient: bool
    warnings: tuple[str, ...]
    prices: str | None = None
    priced: bool = Field(default=True, exclude=True)

    @field_serializer(
        "proposer", "judge", "per_query", "expected", "most", "smallest_cap", when_used="json"
    )
    def _bill(self, value: Usage | None) -> Bill | None:
        return None if value is None else bill(value, priced=self.priced)


def queries_per_round(spec: RunSpec) -> int:
    """Return the training queries of a round: clients x prompts x local steps."""
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
    """Estimate the cost of a run.

    If a model is unavailable, the plan has a warning, and lacks what depends on this model.

    Args:
        federation: The run and its data.
        backend: The model. It counts tokens, and answers queries only in a probe. Without a probe,
            the weights of a local model are not loaded.
        proposer: The model of ``prompt.proposer``.
        probe: Whether to time a local model for some seconds.
        startup_s: Time that the process took to start, seconds; added to the duration.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
        SpecError: The method's settings do not fit each other.
    """
    judge = federation.score.backend if isinstance(federation.score, Judge) else nullcontext()
    async with judge:
        return await _Planner(federation, backend, proposer).plan(probe=probe, startup_s=startup_s)


class _Planner:
    def __init__(
        self, federation: Federation, backend: LLMBackend, proposer: LLMBackend | None
    ) -> None:
        self.federation, self.backend, self.proposer = federation, backend, proposer
        self.judge = federation.score if isinstance(federation.score, Judge) else None
        self.adapter = backend.innermost if isinstance(backend, Wrapper) else backend
        self.spec, self.task = federation.spec, federation.spec.task
        self.size = self.spec.method.batch_size
        self.problems = list[str]()  # Problems with the models, reported as warnings.
        self.per_round = queries_per_round(self.spec)
        self.training = training_queries(self.spec)
        self.rounds = math.ceil(self.training / self.per_round)
        every = self.spec.evaluation.every
        self.points = self.rounds // every if every else 0

    async def plan(self, *, probe: bool, startup_s: float) -> RunPlan:
        spec, training = self.spec, self.training
        await self._check()
        draws = self._draw()
        requests = draws.new_rows if self.adapter.max_inputs == 1 else draws.new_queries
        planned = max(1, training // self.per_round) if spec.method.pools else spec.rounds
        dev = len(self.federation.dev)
        parts = (dev, min(dev, spec.evaluation.examples))
        dev_queries = self._evaluated(*(math.ceil(rows / self.size) for rows in parts))
        leased, query, measured = await self._costs(draws.steps)
        proposals = await self._proposals()
        grade, grade_most = await self._grade()
        compared = 2 * len(self._dev)  # Comparisons of the final prompt's texts, in both orders.
        graded = grade * (self._dev_rows + compared)
        graded_training = _share(grade * (training * self.size), draws.new_rows)
        leased, measured = leased + grade_most * self.size, measured + graded
        trained = _new(query, training, requests, draws.new_rows) + graded_training
        leased_dev = (leased * dev_queries).without_queries() + grade_most * compared
        one_round = Fraction(1, self.rounds or 1)  # A cap of 0 pays for no round.
        round_most = leased * self.per_round + _share(proposals.most, one_round)
        round_expected = (
            _new(query, self.per_round, requests, draws.new_rows)
            + Usage(queries=self.per_round)
            + _share(graded_training + proposals.expected, one_round)
        )
        affordable = Account(cap=spec.budget, spent=leased_dev).affordable(round_most, spec.rounds)
        expected = Account(cap=spec.budget, spent=measured).affordable(round_expected, spec.rounds)
        duration = _by_limits(spec, trained + measured)
        if self.adapter.local and probe:
            try:
                duration = await self._probed(draws, startup_s)
            except BackendError as exc:
                self.problems.append(f"backend: the probe failed: {exc}")
        models = (self.backend, self.proposer, None if self.judge is None else self.judge.backend)
        price = backends.price_of(spec.backend)
        return RunPlan(
            name=spec.name,
            cap=Cap.of(spec.budget),
            clients=len(self.federation.shards),
            vocab_size=len(self.federation.vocabulary),
            queries_per_round=self.per_round,
            rounds=spec.rounds,
            rounds_planned=planned,
            rounds_affordable=affordable,
            rounds_expected=expected,
            training_queries=training,
            distinct_share=round(float(draws.new_rows), 4),
            evaluation_queries=dev_queries,
            proposals=proposals.calls,
            proposer=proposals.expected if proposals.calls else None,
            judge=None if self.judge is None else graded + graded_training,
            per_query=query,
            expected=trained + measured + Usage(queries=training) + proposals.expected,
            most=leased * training + leased_dev + proposals.most,
            smallest_cap=round_most + leased_dev,
            duration=duration,
            sufficient=affordable >= planned,
            warnings=(*self.problems, *self._warnings(affordable, planned)),
            prices=None if price is None else price.text,
            priced=all("usd" in model.bounds for model in models if model is not None),
        )

    async def _check(self) -> None:
        """Remove label words that the model cannot score, and record problems of the model."""
        spec, backend = self.spec, self.backend
        try:
            vocabulary = await backends.usable_vocabulary(backend, spec, self.federation.vocabulary)
            self.federation = replace(self.federation, vocabulary=vocabulary)
            if not self.adapter.local:  # Local models check words when they count tokens.
                for words, form in label_checks(self.task, vocabulary):
                    await backend.check(words, form)
        except (BackendBlocked, BackendUnavailable) as exc:
            self.problems.append(f"backend: {exc}")
        try:
            spec.check_caps(backend.bounds)
        except SpecError as exc:
            self.problems.extend(exc.problems)
        try:
            self.method = RoundMachine.of(spec.name, spec, self.federation.vocabulary).method
        except ValueError as exc:
            raise SpecError(f"method: {exc}") from exc

    # Prompts and rows, drawn as at the start of the run

    def _draw(self) -> _Draws:
        spec, method, shards = self.spec, self.method, self.federation.shards
        state, count = method.init(), spec.method.num_samples
        steps: list[list[Query]] = []
        seen = set[object]()
        pairs = new_pairs = new_queries = 0
        num_steps = min(max(math.ceil(self.training / count), 1), _MAX_STEPS)
        for number in range(max(num_steps, _STEPS)):
            rng = stream(stream_seed(spec.seed, "plan", number))
            shard = shards[int(rng.integers(len(shards)))]
            rows = draw_minibatch(len(shard), self.size, int(rng.integers(1 << 53)))
            batch = [shard[row] for row in rows]
            drawn = method.ask(state, rng, count).prompts.tolist()
            # Texts are compared: with blank candidates, different draws can have the same text.
            prompts = [prompt_of(self.task, self.federation.vocabulary, row) for row in drawn]
            if number < _STEPS:
                distinct = dict.fromkeys(prompts)
                steps.append([self._query(self.backend, prompt, batch) for prompt in distinct])
            together = tuple(self._texts(row) for row in batch)
            for prompt in prompts if number < num_steps else ():
                asked = {(prompt, row if self.adapter.apart else together) for row in together}
                pairs += len(asked)
                new_pairs += len(asked - seen)
                new_queries += not asked <= seen
                seen |= asked
        return _Draws(
            steps=steps,
            new_queries=Fraction(new_queries, num_steps * count),
            new_rows=Fraction(new_pairs, pairs),
        )

    def _query(self, backend: LLMBackend, prompt: TextPrompt, rows: Sequence[Example]) -> Query:
        references = references_of(self.task, rows)
        return backends.query_for(self.task, prompt, rows, backend=backend, references=references)

    def _texts(self, row: Example) -> tuple[object, ...]:
        # The model or the judge reads the expected answer, which may be a list or a mapping.
        answer = repr(row.get(self.task.label_field)) if self.task.generates else None
        return (*(row[name] for name in self.task.fields), answer)

    @property
    def _dev(self) -> Sequence[Example]:
        """The distinct dev rows."""
        return list({self._texts(row): row for row in self.federation.dev}.values())

    def _evaluated(self, whole: int, part: int) -> int:
        """Return the sum over all measurements: of the whole dev split, and of a part of it."""
        return (3 + seeks_cheapest(self.spec)) * whole + self.points * part

    async def _costs(self, steps: Sequence[Sequence[Query]]) -> tuple[Usage, Usage, Usage]:
        """Return a query's reservation and expected usage, and the usage of evaluation."""
        task, vocabulary, dev = self.task, self.federation.vocabulary, self._dev
        untrained = prompt_of(task, vocabulary, self.method.prompt(self.method.init()).tolist())
        sample = [query for step in steps for query in step[: _QUOTED // _STEPS]]
        try:
            measured = await self._quoted_rows(no_prompt(task, vocabulary), dev)
            measured += await self._quoted_rows(untrained, dev) * (2 + seeks_cheapest(self.spec))
            curve = curve_examples(self.spec, dev)
            measured += await self._quoted_rows(untrained, curve) * self.points
            leased = self.backend.worst_case(self.size, task.max_written)
            return leased, await self._quoted(sample, 1), measured.without_queries()
        except BackendError:
            if not self.problems:
                raise
            # The cause is in the list already.
            self.problems.append("backend: tokens and costs cannot be counted without this model")
            return _UNKNOWN, _UNKNOWN, NOTHING

    async def _quoted(self, queries: Sequence[Query], count: int) -> Usage:
        """Return the quote of `count` queries, extrapolated from `queries`."""
        total = sum([await self.backend.quote(query) for query in queries], NOTHING)
        return _share(total, Fraction(count, len(queries))) if queries else NOTHING

    async def _quoted_rows(self, prompt: TextPrompt, rows: Sequence[Example]) -> Usage:
        """Return the quote of a prompt on all rows, extrapolated from a sample of mini-batches."""
        starts = range(0, len(rows), self.size)
        picked = [
            row
            for start in starts[:: math.ceil(len(starts) / _QUOTED) or 1]
            for row in rows[start : start + self.size]
        ]
        queries = backends.prediction_queries(self.backend, self.task, prompt, picked, self.size)
        return await self._quoted(queries, len(starts))

    async def _proposals(self) -> _Proposals:
        proposer, model = self.spec.prompt.proposer, self.proposer
        slot = self.spec.prompt.proposed_slot
        if proposer is None or slot is None:
            return _Proposals()
        if model is None:
            self.problems.append("prompt.proposer: its cost is not included")
            return _Proposals()
        calls = (self.rounds - 1) // proposer.every  # No call after the last round.
        texts = self.federation.vocabulary.candidates_of(slot)
        if self.spec.prompt.reflects:
            # At most one call per assignment, and one per merge.
            calls *= self.spec.participation.clients_per_round
            expected = calls = calls + (self.rounds - 1) // proposer.merge_every
            count = 1
            cases = [
                ({name: str(row[name]) for name in self.task.fields}, _FEEDBACK)
                for row in self.federation.shards[0][:_CASES]
            ]
            messages = reflection.reflection_messages(self.task, slot, max(texts, key=len), cases)
        else:
            count = proposer.count
            expected = min(calls, math.ceil(proposer.max_candidates / count))
            scored = [proposals.ScoredCandidate(text=text, mean_loss=math.log(2)) for text in texts]
            messages = proposals.proposal_messages(self.task, slot, scored, count=count)
        chars = count * (sum(map(len, texts)) // max(len(texts), 1))
        written = min(math.ceil(chars / CHARS_PER_TOKEN) or 1, proposer.max_tokens)
        try:
            quote = await model.quote(backends.written_query(messages, written))
            most = model.worst_case(1, proposer.max_tokens)
        except BackendError as exc:
            self.problems.append(f"prompt.proposer.backend: {exc}")
            return _Proposals(calls=calls)
        return _Proposals(
            calls=calls,
            expected=(quote * expected).without_queries(),
            most=(most * calls).without_queries(),
        )

    async def _grade(self) -> tuple[Usage, Usage]:
        """Return the cost of the judge's grade of one text: expected and worst case."""
        judge, shard = self.judge, self.federation.shards[0]
        if judge is None or not shard:
            return NOTHING, NOTHING
        try:
            queries = [
                judge.query(str(row.get(self.task.label_field, "")), row) for row in shard[:_CASES]
            ]
            quotes = [
                await judge.backend.quote(replace(query, max_tokens=_JUDGE_TOKENS))
                for query in queries
            ]
            most = judge.backend.worst_case(1, MAX_TOKENS)
        except BackendError as exc:
            self.problems.append(f"task.score.judge.backend: {exc}")
            return NOTHING, NOTHING
        mean = _share(sum(quotes, NOTHING), Fraction(1, len(quotes)))
        return mean.without_queries(), most.without_queries()

    @property
    def _dev_rows(self) -> int:
        dev = len(self._dev)
        return self._evaluated(dev, min(dev, self.spec.evaluation.examples))

    async def _probed(self, draws: _Draws, startup_s: float) -> Duration:
        """Return the duration. The model is timed without cache and budget."""
        bare, dev_rows = no_prompt(self.task, self.federation.vocabulary), self._dev_rows
        return await timed(
            self.adapter,
            self.spec,
            draws.steps,
            warm_up=self._query(self.adapter, bare, self.federation.shards[0][:1]),
            requests=float(self.training * draws.new_queries + Fraction(dev_rows, self.size)),
            rows=float(self.training * draws.new_rows * self.size + dev_rows),
            rounds=self.rounds,
            startup_s=startup_s,
        )

    def _warnings(self, affordable: int, planned: int) -> list[str]:
        spec, clients = self.spec, len(self.federation.shards)
        size, smallest = self.size, min(map(len, self.federation.shards))
        needed = spec.participation.min_clients or 0
        pays = (
            f"pays {affordable} of {planned} rounds"
            if affordable
            else f"cannot pay one round of {self.per_round} queries"
        )
        problems = {
            "budget: no cap is set": spec.budget is None,
            f"budget: {pays} at worst-case cost": affordable < max(planned, 1),
            f"participation.min_clients: is {needed}, but there are only {clients} clients": (
                needed > clients
            ),
            "data.dev: is missing, so the run has no evaluation": not self.federation.dev,
            "data: clients share rows, because there are not enough rows for all": (
                self.federation.reused_rows
            ),
            f"method.batch_size: is {size}, but the smallest client has {smallest} examples": (
                smallest < size
            ),
        }
        return [problem for problem, holds in problems.items() if holds]


_JUDGE_TOKENS = 40
"""Typical number of tokens of a judge's answer."""

_CASES, _FEEDBACK = 6, "expected 'positive', answered 'negative' with probability 0.60"
"""Number of sample rows for reflection and for the judge, and a feedback of typical length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Queries drawn from the untrained method, as a run draws them.

    In a real run the shares fall, because the method draws fewer and fewer different prompts.
    """

    steps: list[list[Query]]  # The distinct queries of some steps.
    new_queries: Fraction  # Expected share of the queries that are not in the cache.
    new_rows: Fraction  # Expected share of the (prompt, row) pairs that are not in the cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposals:
    """The maximum number of calls of the proposer, and their cost."""

    calls: int = 0
    expected: Usage = NOTHING
    most: Usage = NOTHING


def _new(query: Usage, count: int, requests: Fraction, rows: Fraction) -> Usage:
    """Return the usage of `count` queries if only these shares of requests and rows are sent."""
    return _share((query * count).without_queries(), rows, requests)


def _share(total: Usage, share: Fraction, requests: Fraction | None = None) -> Usage:
    """Return a share of a usage; the share of the requests may differ."""
    return Usage(
        queries=math.ceil(total.queries * share),
        requests=math.ceil(total.requests * (share if requests is None else requests)),
        prompt_tokens=math.ceil(total.prompt_tokens * share),
        completion_tokens=math.ceil(total.completion_tokens * share),
        usd=total.usd * share.numerator / share.denominator,
    )


def _by_limits(spec: RunSpec, expected: Usage) -> Duration | None:
    limits = spec.backend.limits
    tokens = expected.prompt_tokens + expected.completion_tokens
    pairs = (expected.requests, limits.requests_per_minute), (tokens, limits.tokens_per_minute)
    minutes = [amount / limit for amount, limit in pairs if limit is not None]
    return Duration(basis="rate_limits", seconds=round(60 * max(minutes), 1)) if minutes else None
