"""The cost of a run's queries: expected, by a sample, and at most, by its rows and candidates."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedone_sdk.aggregator.rounds.prompts import candidates
from fedone_sdk.aggregator.serving.evaluation import curve_examples
from fedone_sdk.aggregator.serving.model_checks import check_caps
from fedone_sdk.backends import (
    LLMBackend,
    Query,
    prediction_queries,
    query_for,
    usable_vocabulary,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.calibration import CONTENT_FREE
from fedone_sdk.candidates import label_checks, no_prompt, prompt_of
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, SpecError
from fedone_sdk.local.federation import Federation
from fedone_sdk.local.traffic import first_work, planned_machine, unbudgeted
from fedone_sdk.messages import LossesAssignment
from fedone_sdk.task import Example, TextPrompt, references_of

_SAMPLE = 128
"""Sampled queries whose tokens are counted: of the run's rounds, and of each measurement."""

_ONE = Usage(queries=1, requests=1)
"""The usage of a query without further information."""

_AT_ONCE = 64
"""Inputs that are counted concurrently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestTokens:
    """Upper bounds on prompt tokens.

    Attributes:
        query: One training query: the longest rows of the client with the longest rows.
        no_prompt: The dev split without a prompt.
        whole: The dev split with the longest prompt.
        point: One point of the curve with the longest prompt.
    """

    query: int
    no_prompt: int
    whole: int
    point: int

    def total(self, *, queries: int, points: int) -> int:
        """Prompt tokens of a whole run."""
        return self.query * queries + self.no_prompt + 2 * self.whole + self.point * points


async def longest_tokens(
    federation: Federation, backend: LLMBackend
) -> LongestTokens:
    """Count the tokens of every row and every candidate of the run.

    The bound for an input is the sum of the row's tokens without a prompt, the most tokens that one
    candidate adds to the row, n - 1 times the most that a candidate adds to itself, and 1; capped
    by the model's context. The first candidate is counted separately because it may replace a
    default system message. The 1 covers a tokeniser that splits differently where prompt and row
    meet within a word.  Each slot adds at most what its longest
    candidate adds to the first candidates of the others.

    Raises:
        BackendError: An input exceeds the model's context.
    """
    spec = federation.spec
    counter = _Counter(federation, backend)
    added = await counter.added()
    room = backend.worst_case(1, spec.task.max_written).prompt_tokens

    async def longest(rows: Sequence[Example]) -> list[int]:
        return [min(count + added, room) for count in await counter.rows("", rows)]

    free: list[Example] = []
    if federation.dev and spec.calibration.kind == "contextual":
        free = [dict.fromkeys(spec.task.fields, text) for text in CONTENT_FREE]
    held = iter(await longest([row for shard in federation.shards for row in shard]))
    shards = [[next(held) for _ in shard] for shard in federation.shards]
    point = await longest([*curve_examples(spec, federation.dev), *free])
    return LongestTokens(
        query=max(sum(sorted(each)[-spec.method.batch_size :]) for each in shards),
        no_prompt=sum(await counter.rows("", [*federation.dev, *free])),
        whole=sum(await longest([*federation.dev, *free])),
        point=sum(point),
    )


class _Counter:
    """Counts the tokens of single inputs."""

    def __init__(self, federation: Federation, backend: LLMBackend) -> None:
        self._federation = federation
        self._backend = backend

    async def rows(self, prompt: TextPrompt, rows: Sequence[Example]) -> list[int]:
        """Return the tokens of each row under one prompt."""
        distinct = {id(row): row for row in rows}  # Clients may share rows.
        counts = await self._counts([self._query(prompt, row) for row in distinct.values()])
        known = dict(zip(distinct, counts, strict=True))
        return [known[id(row)] for row in rows]

    async def added(self) -> int:
        """Return the most tokens that a prompt of n candidates adds to a row."""
        row = min(self._federation.shards[0], key=lambda row: sum(map(len, map(str, row.values()))))
        if self._federation.vocabulary.slots:
            return await self._added_by_slots(row)
        candidates, length = (
            self._federation.vocabulary.candidates,
            self._federation.spec.prompt.length,
        )
        bare, *once = await self._counts([self._query(text, row) for text in ("", *candidates)])
        first = max((count - bare for count in once), default=0)
        if length == 1:
            return max(first, 0) + 1
        twice = await self._counts([self._query(text * 2, row) for text in candidates])
        further = max((b - a for a, b in zip(once, twice, strict=True)), default=0)
        return max(first, 0) + (length - 1) * max(further, 0) + 1

    async def _added_by_slots(self, row: Example) -> int:
        task, vocabulary = self._federation.spec.task, self._federation.vocabulary
        firsts = [0] * self._federation.spec.prompt.length
        tried, positions = [firsts], [0] * len(firsts)
        for position in range(len(firsts)):
            for index in range(1, len(vocabulary.of_position(position))):
                tried.append([*firsts[:position], index, *firsts[position + 1 :]])
        prompts = [prompt_of(task, vocabulary, indices) for indices in tried]
        bare, base, *counts = await self._counts(
            [self._query(prompt, row) for prompt in ("", *prompts)]
        )
        for indices, count in zip(tried[1:], counts, strict=True):
            position = next(at for at, index in enumerate(indices) if index)
            positions[position] = max(positions[position], count - base)
        # A tokeniser may split a slot differently where it meets its neighbours.
        return max(base - bare, 0) + sum(positions) + len(firsts)

    def _query(self, prompt: TextPrompt, row: Example) -> Query:
        task = self._federation.spec.task
        return query_for(
            task, prompt, [row], backend=self._backend, references=references_of(task, [row])
        )

    async def _counts(self, queries: Sequence[Query]) -> list[int]:
        found: list[int] = []
        for at in range(0, len(queries), _AT_ONCE):
            chunk = queries[at : at + _AT_ONCE]
            quotes = await asyncio.gather(*(self._backend.quote(query) for query in chunk))
            found += [quote.prompt_tokens for quote in quotes]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCosts:
    """The cost of a run's queries.

    Attributes:
        model: The model's fingerprint.
        worst: Upper bound of a training query.
        worst_measured: Upper bound of an evaluation query.
        query: Mean of a training query.
        no_prompt: The dev split without a prompt.
        whole: The dev split with the untrained prompt.
        point: A point of the curve with the untrained prompt.
        longest: Tokens of the longest rows and candidates; None if not counted.
    """

    model: str = "unknown"
    worst: Usage = _ONE
    worst_measured: Usage = _ONE
    query: Usage = _ONE
    no_prompt: Usage = NOTHING
    whole: Usage = NOTHING
    point: Usage = NOTHING
    longest: LongestTokens | None = None


async def query_costs(
    federation: Federation, backend: LLMBackend, adapter: LLMBackend
) -> tuple[QueryCosts, list[str]]:
    """Count what queries cost, and list problems of the backend."""
    spec, size, troubles = federation.spec, federation.spec.method.batch_size, list[str]()
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

    async def measured(prompt: TextPrompt, examples: Sequence[Example]) -> Usage:
        calibration = spec.calibration.label_free
        return await _quoted(
            backend, prediction_queries(backend, spec.task, prompt, examples, size, calibration)
        )

    method = planned_machine(federation, spec, "").method
    indices = method.prompt(method.init()).tolist()
    untrained = prompt_of(spec.task, federation.vocabulary, indices)
    queries = _sample(federation, backend)
    largest = max(size, len(CONTENT_FREE)) if spec.calibration.kind == "contextual" else size
    try:
        total = await _quoted(backend, queries)
        costs = QueryCosts(
            model=backend.fingerprint,
            worst=backend.worst_case(size, spec.task.max_written),
            worst_measured=backend.worst_case(largest, spec.task.max_written),
            query=_share(total, 1, len(queries)),
            no_prompt=await measured(no_prompt(spec.task, federation.vocabulary), federation.dev),
            whole=await measured(untrained, federation.dev),
            point=await measured(untrained, curve_examples(spec, federation.dev)),
            longest=await longest_tokens(federation, adapter) if adapter.local else None,
        )
    except BackendError:
        if not troubles:
            raise
        # This problem also prevents counting.
        troubles.append("backend: tokens and costs cannot be counted without it")
        return QueryCosts(), troubles
    return costs, troubles


async def _quoted(backend: LLMBackend, queries: Sequence[Query]) -> Usage:
    """Return the expected usage of queries; of many, a sample is counted and scaled."""
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


def _sample(federation: Federation, backend: LLMBackend) -> list[Query]:
    """Return queries of the run's rounds, on the clients and mini-batches that it will draw.

    The prompts are drawn from the untrained alpha.
    """
    machine = planned_machine(federation, unbudgeted(federation.spec, "losses"), "")
    queries = []
    for number in range(_SAMPLE):
        round_number = number * federation.spec.rounds // _SAMPLE
        state, assignment = first_work(federation, machine, round_number)
        shard = federation.shards[state.seats[0].client]
        assert isinstance(assignment, LossesAssignment)
        drawn = candidates(machine, state, state.seats[0]).prompts.tolist()
        batch = [
            shard[row]
            for row in draw_minibatch(
                len(shard), federation.spec.method.batch_size, assignment.minibatch_seed
            )
        ]
        task = federation.spec.task
        query = query_for(
            task,
            prompt_of(task, federation.vocabulary, drawn[number % len(drawn)]),
            batch,
            backend=backend,
            references=references_of(task, batch),
        )
        queries.append(query)
    return queries
