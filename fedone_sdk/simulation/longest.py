"""Upper bound of a run's tokens, from its rows and its candidates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fedone_sdk.aggregator.serving.evaluation import curve_examples
from fedone_sdk.backends import LLMBackend, Query, query_for
from fedone_sdk.calibration import CONTENT_FREE
from fedone_sdk.candidates import prompt_of
from fedone_sdk.simulation.federation import Federation
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import Example, TextPrompt, references_of

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
    federation: Federation, backend: LLMBackend, untrained: TextPrompt | SoftPrompt
) -> LongestTokens:
    """Count the tokens of every row and every candidate of the run.

    The bound for an input is the sum of the row's tokens without a prompt, the most tokens that one
    candidate adds to the row, n - 1 times the most that a candidate adds to itself, and 1; capped
    by the model's context. The first candidate is counted separately because it may replace a
    default system message. The 1 covers a tokeniser that splits differently where prompt and row
    meet within a word. Vectors are counted directly. Each slot adds at most what its longest
    candidate adds to the first candidates of the others.

    Raises:
        BackendError: An input exceeds the model's context.
    """
    spec = federation.spec
    counter = _Counter(federation, backend)
    soft = untrained if isinstance(untrained, SoftPrompt) else None
    added = 0 if soft is not None else await counter.added()
    room = backend.worst_case(1, spec.task.max_written).prompt_tokens

    async def longest(rows: Sequence[Example]) -> list[int]:
        return [min(count + added, room) for count in await counter.rows(soft or "", rows)]

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

    async def rows(self, prompt: TextPrompt | SoftPrompt, rows: Sequence[Example]) -> list[int]:
        """The tokens of each row under one prompt."""
        distinct = {id(row): row for row in rows}  # Clients may share rows.
        counts = await self._counts([self._query(prompt, row) for row in distinct.values()])
        known = dict(zip(distinct, counts, strict=True))
        return [known[id(row)] for row in rows]

    async def added(self) -> int:
        """The most tokens that a prompt of n candidates adds to a row."""
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

    def _query(self, prompt: TextPrompt | SoftPrompt, row: Example) -> Query:
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
