"""A run's state as bytes: an exact round trip."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedone_sdk.aggregator.rounds.by_class import ByClass
from fedone_sdk.aggregator.rounds.run_state import (
    RunState,
    Seat,
    arrays_of,
    decode,
    decode_snapshot,
    encode_document,
    encode_snapshot,
)
from fedone_sdk.aggregator.runs.run_registry import StoredRun
from fedone_sdk.algorithms import State, dump_memory
from fedone_sdk.budget import Account, Budget, Usage
from fedone_sdk.messages import MetricReport, Tensor, Verdict
from fedone_sdk.stores.base import RunHead
from tests.unit.machine.game import plain

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
names = st.text(min_size=1, max_size=8)
usages = st.builds(Usage, queries=counts, requests=counts, usd=st.decimals("0", "1e9", places=18))
alphas = st.lists(st.floats(0.0078125, 8, width=32), min_size=6, max_size=6).map(
    lambda values: np.array(values, np.float32).reshape(2, 3)
)
memories = st.dictionaries(
    st.sampled_from(["m", "v", "t", "a/b"]),
    st.sampled_from([np.float32, np.float64, np.int64]).map(lambda kind: np.arange(3, dtype=kind)),
)
states = st.builds(State, alpha=alphas, memory=memories)
accounts = st.builds(
    Account,
    cap=st.none()
    | st.builds(Budget, usd=st.decimals("0", "1e9", places=18), tokens=st.none() | counts),
    spent=usages,
    leases=st.dictionaries(names, usages, max_size=3),
)
by_class = st.builds(
    ByClass,
    means=st.lists(st.floats(0, 9, width=32), min_size=4, max_size=4).map(
        lambda values: Tensor.pack(values, (2, 2, 1), "float32")
    ),
    counts=st.tuples(numbers, numbers),
    scored=counts,
)
seats = st.builds(
    Seat,
    number=st.integers(0, 99),
    client=st.integers(0, 10**6),
    phase=st.sampled_from(["offered", "working", "done"]),
    due=numbers,
    step=st.integers(0, 9),
    assignment_id=st.none() | names,
    own_model=st.booleans(),
    num_samples=st.integers(0, 99),
    num_steps=st.integers(0, 9),
    sent=st.dictionaries(names, usages, max_size=3),
    renewals=st.integers(0, 9),
    used=usages,
    queries=counts,
    local=st.none() | states,
    losses=st.lists(st.lists(numbers, max_size=3).map(tuple), max_size=3).map(tuple),
    by_class=st.lists(by_class, max_size=2).map(tuple),
    weight=st.integers(1, 2**31),
    mean_loss=numbers,
)
run_states = st.builds(
    RunState,
    status=st.sampled_from(["running", "completed", "failed"]),
    reason=st.none() | st.text(max_size=9),
    summary=st.none() | st.text(max_size=9),
    round=counts,
    rollbacks=counts,
    quarantined=st.frozensets(st.integers(0, 9)),
    defence=memories,
    releases=st.dictionaries(st.integers(0, 99), counts, max_size=3),
    method=states,
    account=accounts,
    evaluation=accounts,
    seats=st.lists(seats, max_size=4, unique_by=lambda seat: seat.number).map(tuple),
    drawn_last=st.frozensets(st.integers(0, 99), max_size=4),
    lost=counts,
    fills=counts,
    model=st.none() | names,
    started_at=st.none() | numbers,
    ended_at=st.none() | numbers,
    metric=st.builds(MetricReport, name=names, after=st.none() | numbers),
    proposed=st.just(()) | st.just((("slot", " text"), ("slot", " more"))),
    waiting=st.just(()) | st.just((("slot", " last"),)),
)


@given(run_states)
@settings(max_examples=100)
def test_round_trip(state: RunState) -> None:
    document = encode_document(state)
    again = decode(json.loads(document), dump_memory(arrays_of(state)))
    assert plain(again) == plain(state)
    assert encode_document(again) == document


def simple() -> RunState:
    return RunState(
        method=State(alpha=np.ones((2, 3), np.float32)),
        account=Account(cap=Budget(usd=Decimal("0.10000000000000000000000000001"))),
        evaluation=Account(),
        seats=(Seat(number=1, client=4, phase="offered", due=1.0),),
        metric=MetricReport(name="accuracy"),
    )


def test_money_has_no_rounding() -> None:
    state = simple()
    again = decode(json.loads(encode_document(state)), dump_memory(arrays_of(state)))
    assert again.account.cap == state.account.cap


def test_unchanged_arrays_stay_the_same_objects() -> None:
    """So a run need not write them again."""
    state = simple()
    later = dataclasses.replace(state, round=1, seats=())
    assert arrays_of(state).keys() == arrays_of(later).keys()
    assert all(arrays_of(later)[key] is value for key, value in arrays_of(state).items())


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.pop("account"),
        lambda document: document.update(surprise=1),
        lambda document: document["seats"][0].update(surprise=1),
        lambda document: document["seats"][0].pop("number"),
        lambda document: document["account"].update(spent={"queries": -1}),
        lambda document: document.update(metric=None),
        lambda document: document.update(drawn_last=None),
        lambda document: document.update(bias=1.0),
        lambda document: document["seats"][0].update(by_class=[{"counts": [1]}]),
        lambda document: document["seats"][0].update(by_class=[{"counts": [1], "means": {}}]),
    ],
)
def test_a_damaged_document_is_refused(damage: Any) -> None:
    state = simple()
    document = json.loads(encode_document(state))
    damage(document)
    with pytest.raises(ValueError, match=r"not a run's state|validation error"):
        decode(document, dump_memory(arrays_of(state)))


def test_a_damaged_head_is_refused() -> None:
    for text in "", "[]", "[" * 100_000:
        head = RunHead(run_id="a", spec="{}", document=text, version=1, created_at=0.0)
        with pytest.raises(ValueError, match=r"not a run's state|Expecting value"):
            StoredRun.of(head)


@pytest.mark.parametrize("arrays", [b"", b"x" * 100, dump_memory({"other": np.ones(3)})])
def test_damaged_arrays_are_refused(arrays: bytes) -> None:
    with pytest.raises(ValueError, match=r"saved|missing"):
        decode(json.loads(encode_document(simple())), arrays)


def test_every_field_is_written() -> None:
    arrays = {"method", "defence"}
    document = json.loads(encode_document(simple()))
    assert document.keys() == {field.name for field in dataclasses.fields(RunState)} - arrays
    (seat,) = document["seats"]
    assert seat.keys() == {field.name for field in dataclasses.fields(Seat)} - {"local"}
    verdict = Verdict(conclusion="unclear", source="dev", bias=(0.0, 0.5), examples=7)
    judged = dataclasses.replace(simple(), verdict=verdict, unfit={4: "why"}, planned=80)
    again = decode(json.loads(encode_document(judged)), dump_memory(arrays_of(judged)))
    assert (again.verdict, again.unfit, again.planned) == (verdict, {4: "why"}, 80)


def test_a_snapshot_has_what_a_rollback_restores() -> None:
    method = State(alpha=np.ones((2, 3), np.float32), memory={"m": np.arange(3)})
    state = dataclasses.replace(simple(), method=method)
    assert plain(decode_snapshot(encode_snapshot(state))) == plain(method)
    with pytest.raises(ValueError, match="has no alpha"):
        decode_snapshot(dump_memory({"other": np.ones(3)}))
