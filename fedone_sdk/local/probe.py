"""The duration of a run, from a short timing of a local model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

from fedone_sdk.backends import LLMBackend, Query, score_all
from fedone_sdk.messages import Message
from fedone_sdk.spec import RunSpec

_TIMED_S = 3.0
"""Seconds of queries to a local model that its speed is measured over."""

_TIMED_ROWS = 4
"""Rows of the longer one of two timed requests."""

_SLOW_S = 1.0
"""Seconds of one request from which on requests are timed one at a time."""

_ROUND_S = 0.03
"""Processor seconds of a round's messages and of the method, without the model, on one core: 0.026
over 99 rounds of ``gs-bdpl`` with 20 prompts over HTTP."""

_POOL_ROUND_S = 0.04
"""The same for methods that fit a model to all answers: 0.041 over 49 rounds of ``thompson``."""


class Duration(Message):
    """The estimated duration of a run.

    Attributes:
        basis: ``probe``: by queries timed on this machine; ``rate_limits``: the lower bound that
            the backend's rate limits imply.
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
    """Return the duration of some requests and rows at a local model's speed.

    The prompts of each step are timed on one row and on some rows, together as in the run: a
    request costs a constant, such as a prefix that its rows share, and so much per row. Models that
    are not asked row by row are timed by whole queries. The `warm_up` query comes first, so that
    one-time costs of the first pass count as the start.

    Args:
        backend: The model, without its client.
        spec: The run.
        steps: Queries of some steps, as the run draws them.
        warm_up: A short query.
        requests: Requests of the run.
        rows: Rows in them.
        rounds: Rounds of the run.
        startup_s: Seconds since the process started.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    await backend.score(warm_up)
    loaded = loop.time()
    startup_s += loaded - began
    most = len(steps[0][0].inputs)
    sizes = (min(_TIMED_ROWS, most), 1) if backend.apart and most > 1 else (most,)
    # The first query is timed alone, so that a slow model is timed by few.
    waiting = deque([[steps[0][0].part(range(sizes[0]))]])
    waiting += [[query.part(range(size)) for query in step] for step in steps for size in sizes]
    timed = {size: (0, 0.0) for size in sizes}
    while waiting and sum(seconds for _, seconds in timed.values()) < _TIMED_S:
        asked = waiting.popleft()
        start = loop.time()
        await score_all(backend, asked)
        took, size = loop.time() - start, len(asked[0].inputs)
        count, seconds = timed[size]
        timed[size] = count + len(asked), seconds + took
        if took > _SLOW_S * len(asked):
            waiting = deque([query] for queries in waiting for query in queries)
    each = {size: seconds / count for size, (count, seconds) in timed.items() if count}
    if len(each) > 1:
        row_s = max(each[sizes[0]] - each[1], 0.0) / (sizes[0] - 1)
    else:
        row_s = each[sizes[0]] / sizes[0]
    request_s = max(each[sizes[0]] - row_s * sizes[0], 0.0)
    round_s = _POOL_ROUND_S if spec.method.pools else _ROUND_S
    return Duration(
        basis="probe",
        seconds=round(startup_s + request_s * requests + row_s * rows + round_s * rounds, 1),
        probe_queries=sum(count for count, _ in timed.values()),
        probe_s=round(sum(seconds for _, seconds in timed.values()), 1),
    )
