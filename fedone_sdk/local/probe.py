"""The duration of a run, estimated by timing a local model for some seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

from fedone_sdk.backends import LLMBackend, Query, score_all
from fedone_sdk.messages import Message
from fedone_sdk.spec import RunSpec

_TIMED_S = 3.0
"""Duration of the timing, seconds."""

_TIMED_ROWS = 4
"""Number of rows of the larger timed requests; the smaller ones have one row."""

_SLOW_S = 1.0
"""If a request takes more seconds than this, requests are timed one at a time."""

_ROUND_S = 0.03
"""Seconds that a round takes in addition to the model's time, on one core. Measured: 0.026 (mean of
99 rounds of ``gs-bdpl`` with 20 prompts over HTTP)."""

_POOL_ROUND_S = 0.04
"""Like `_ROUND_S`, for a method that fits a statistical model to all answers. Measured: 0.041 (mean
of 49 rounds of ``thompson``)."""


class Duration(Message):
    """The estimated duration of a run.

    Attributes:
        basis: ``probe``: from queries timed on this machine; ``rate_limits``: a lower bound, from
            the backend's rate limits.
    """

    basis: Literal["probe", "rate_limits"]
    seconds: float
    probe_queries: int = 0
    probe_s: float = 0.0


async def timed(
    backend: LLMBackend,
    spec: RunSpec,
    steps: Sequence[Sequence[Query]],
    *,
    warm_up: Query,
    requests: float,
    rows: float,
    rounds: int,
    startup_s: float,
) -> Duration:
    """Return the duration of a run at a local model's speed.

    A request takes a constant time (for the common prefix of its rows) and a time per row. To find
    both, requests with one row and with more rows are timed. If a model does not process rows one
    by one, whole queries are timed. The `warm_up` query comes first, and counts as part of the
    start. `steps` are queries of the run, one list per local step. `requests`, `rows` and `rounds`
    are the run's numbers; `startup_s` is the time of the start.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    await backend.score(warm_up)
    startup_s += loop.time() - began
    steps = sorted(steps, key=lambda step: -len(step[0].inputs))  # Some devices have few rows.
    max_rows = len(steps[0][0].inputs)
    sizes = (min(_TIMED_ROWS, max_rows), 1) if backend.apart and max_rows > 1 else (max_rows,)
    largest = sizes[0]
    # The first query is timed alone, so that a slow model answers few queries.
    waiting = deque([[steps[0][0].part(range(largest))]])
    whole = [(step, size) for step in steps for size in sizes if size <= len(step[0].inputs)]
    waiting += [[query.part(range(size)) for query in step] for step, size in whole]
    timings = {size: (0, 0.0) for size in sizes}
    while waiting and sum(seconds for _, seconds in timings.values()) < _TIMED_S:
        queries = waiting.popleft()
        start = loop.time()
        await score_all(backend, queries)
        elapsed_s, size = loop.time() - start, len(queries[0].inputs)
        count, seconds = timings[size]
        timings[size] = count + len(queries), seconds + elapsed_s
        if elapsed_s > _SLOW_S * len(queries):
            waiting = deque([query] for step in waiting for query in step)
    query_s = {size: seconds / count for size, (count, seconds) in timings.items() if count}
    if len(query_s) > 1:
        row_s = max(query_s[largest] - query_s[1], 0.0) / (largest - 1)
    else:
        row_s = query_s[largest] / largest
    request_s = max(query_s[largest] - row_s * largest, 0.0)
    round_s = _POOL_ROUND_S if spec.method.pools else _ROUND_S
    return Duration(
        basis="probe",
        seconds=round(startup_s + request_s * requests + row_s * rows + round_s * rounds, 1),
        probe_queries=sum(count for count, _ in timings.values()),
        probe_s=round(sum(seconds for _, seconds in timings.values()), 1),
    )
