"""Decoders of files, databases and network data raise only their documented errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from fedone_sdk.aggregator.rounds.run_state import RunState, decode
from fedone_sdk.algorithms import State, dump_memory, dump_state, load_memory, load_state
from fedone_sdk.backends.answers import dump_answer, load_answer
from fedone_sdk.backends.base import Answer
from fedone_sdk.budget import Usage
from fedone_sdk.client.admin import _server_sent
from fedone_sdk.client.transport import _refusal
from fedone_sdk.errors import MessageError, ProblemError, TransportError
from tests.fuzz.damage import damaged, damaged_bytes, messages
from tests.fuzz.states import working_state

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
@given(data=st.data())
def test_saved_arrays(data: st.DataObject) -> None:
    for good, load in ((dump_memory(STATE.memory), load_memory), (dump_state(STATE), load_state)):
        damages = data.draw(damaged_bytes(good)), sealed(data.draw(damaged_bytes(good[32:])))
        for bad in damages:
            with contextlib.suppress(ValueError):
                load(bad)


@MANY
@given(data=st.data())
def test_stored_states(data: st.DataObject) -> None:
    document, arrays = working_state()
    text = data.draw(damaged(json.dumps(document).encode()))
    with contextlib.suppress(ValueError, RecursionError):
        bad = json.loads(text)
        with contextlib.suppress(ValueError):
            assert isinstance(decode(bad, arrays), RunState)


@MANY
@given(data=st.data())
def test_cached_answers(data: st.DataObject) -> None:
    with contextlib.suppress(ValueError):
        load_answer(data.draw(damaged_bytes(dump_answer(ANSWER))))


PROBLEMS_SENT = [entry["body"].encode() for entry in messages("Problem")] or [
    b'{"type":"urn:fedone:problem:not_found","title":"t","status":404,"code":"not_found",'
    b'"detail":"d"}'
]


@MANY
@given(data=st.data(), status=st.integers(300, 599))
def test_refusals(data: st.DataObject, status: int) -> None:
    headers = CIMultiDict({"Retry-After": data.draw(damaged_bytes(b"12")).decode("latin-1")})
    body = data.draw(damaged(data.draw(st.sampled_from(PROBLEMS_SENT))))
    error = _refusal("/v1/x", status, headers, body)
    assert isinstance(error, (MessageError, ProblemError, TransportError))
    str(error)


STREAM = (
    b'event: round\ndata: {"round":0,"client_id":"c","queries":4,"mean_loss":0.5}\n\n'
    b': keep-alive\n\nevent: end\ndata: {"run_id":"r"}\n\n'
)


@MANY
@given(data=st.data(), size=st.integers(1, 40))
def test_event_streams(data: st.DataObject, size: int) -> None:
    async def read(stream: bytes) -> list[tuple[str, bytes]]:
        class Pieces:
            async def iter_any(self) -> AsyncIterator[bytes]:
                for at in range(0, len(stream), size):
                    yield stream[at : at + size]

        return [found async for found in _server_sent(Pieces())]  # type: ignore[arg-type]

    good = asyncio.run(read(STREAM))
    assert [name for name, _ in good] == ["round", "end"]
    with contextlib.suppress(MessageError):
        asyncio.run(read(data.draw(damaged_bytes(STREAM))))
