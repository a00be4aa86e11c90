"""Decoders of files, databases and network data raise only their documented errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from fedone_sdk.aggregator.rounds.codec import decode
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.algorithms import State, dump_memory, dump_state, load_memory, load_state
from fedone_sdk.backends.answers import dump_answer, load_answer
from fedone_sdk.backends.base import Answer
from fedone_sdk.budget import Usage
from fedone_sdk.client.admin import _server_sent
from fedone_sdk.client.transport import _refusal, _retry_after_s
from fedone_sdk.errors import (
    MessageError,
    ProblemError,
    TransportError,
)
from tests.fuzz.mutate import damaged, damaged_bytes, vectors
from tests.fuzz.states import working_state

SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
MANY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

STATE = State(
    alpha=np.ones((2, 3), dtype=np.float32),
    memory={"count": np.arange(4), "moments": np.ones((2, 3))},
)
ANSWER = Answer(
    log_probs=((-0.5, -1.0), None),
    model="m-1",
    usage=Usage(requests=1, prompt_tokens=9, usd="0.0001"),
)


def sealed(payload: bytes) -> bytes:
    """A payload with its correct digest, so that its content is read."""
    return hashlib.sha256(payload).digest() + payload


@MANY
@given(seed=SEEDS)
def test_saved_arrays(seed: int) -> None:
    rng = random.Random(seed)
    for good, load in ((dump_memory(STATE.memory), load_memory), (dump_state(STATE), load_state)):
        for bad in (damaged_bytes(rng, good), sealed(damaged_bytes(rng, good[32:]))):
            with contextlib.suppress(ValueError):
                load(bad)


@MANY
@given(seed=SEEDS)
def test_stored_states(seed: int) -> None:
    rng = random.Random(seed)
    document, arrays = working_state()
    text = damaged(rng, json.dumps(document).encode())
    with contextlib.suppress(ValueError, RecursionError):
        bad = json.loads(text)
        with contextlib.suppress(ValueError):
            assert isinstance(decode(bad, arrays), RunState)


@MANY
@given(seed=SEEDS)
def test_cached_answers(seed: int) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        load_answer(damaged(random.Random(seed), dump_answer(ANSWER)))


PROBLEMS_SENT = [entry["body"].encode() for entry in vectors("Problem")] or [
    b'{"type":"urn:fedone:problem:not_found","title":"t","status":404,"code":"not_found",'
    b'"detail":"d"}'
]


@MANY
@given(seed=SEEDS, status=st.integers(300, 599))
def test_refusals(seed: int, status: int) -> None:
    rng = random.Random(seed)
    headers = CIMultiDict({"Retry-After": damaged_bytes(rng, b"12").decode("latin-1")})
    error = _refusal("/v1/x", status, headers, damaged(rng, rng.choice(PROBLEMS_SENT)))
    assert isinstance(error, (MessageError, ProblemError, TransportError))
    str(error)


@given(
    value=st.one_of(
        st.text(max_size=20),
        st.floats().map(str),
        st.sampled_from(
            ["nan", "-nan", "inf", "-inf", "1e400", "1_0", "Wed, 21 Oct 2026 07:28:00"]
        ),
    )
)
def test_how_long_to_wait(value: str) -> None:
    assert 0.0 <= _retry_after_s({"Retry-After": value}) <= 3600.0


STREAM = (
    b'event: round\ndata: {"round":0,"client_id":"c","queries":4,"mean_loss":0.5}\n\n'
    b': keep-alive\n\nevent: end\ndata: {"run_id":"r"}\n\n'
)


class _Chunks:
    """A stream that was cut into pieces."""

    def __init__(self, rng: random.Random, data: bytes) -> None:
        self._rng, self._data = rng, data

    async def iter_any(self) -> Any:
        """The pieces."""
        at = 0
        while at < len(self._data):
            size = self._rng.randrange(1, 40)
            yield self._data[at : at + size]
            at += size


@MANY
@given(seed=SEEDS)
def test_event_streams(seed: int) -> None:
    rng = random.Random(seed)

    async def read(data: bytes) -> list[tuple[str, bytes]]:
        return [found async for found in _server_sent(_Chunks(rng, data))]  # type: ignore[arg-type]

    good = asyncio.run(read(STREAM))
    assert [name for name, _ in good] == ["round", "end"]
    with contextlib.suppress(MessageError):
        asyncio.run(read(damaged_bytes(rng, STREAM)))
