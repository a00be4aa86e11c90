"""Lossless codec of a run's state: a JSON document and a block of arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from fedone_sdk.aggregator.rounds.curves import Curves
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Memory, State, dump_memory, load_memory
from fedone_sdk.budget import Account, Budget, Usage
from fedone_sdk.messages import MetricReport, Verdict

_METHOD, _DEFENCE = "method", "defence"


def arrays_of(state: RunState) -> dict[str, Any]:
    """Return all arrays of a state by name, without copies."""
    arrays = _named(_METHOD, state.method)
    arrays |= {f"{_DEFENCE}/{key}": value for key, value in state.defence.items()}
    for seat in state.seats:
        if seat.local is not None:
            arrays |= _named(f"seat{seat.slot}", seat.local)
    return arrays


def encode_snapshot(state: RunState) -> bytes:
    """Return what a rollback restores: the method's state."""
    return dump_memory(_named(_METHOD, state.method))


def decode_snapshot(arrays: bytes) -> State:
    """Return the method's state of a snapshot.

    Raises:
        ValueError: The snapshot is damaged.
    """
    method = _unnamed(_METHOD, load_memory(arrays))
    if method is None:
        raise ValueError("the snapshot has no alpha")
    return method


def encode_arrays(arrays: Memory) -> bytes:
    """Return the arrays of `arrays_of` as bytes."""
    return dump_memory(arrays)


def encode_document(state: RunState) -> dict[str, Any]:
    """Return the state without its arrays, as JSON values."""
    return {
        "status": state.status,
        "reason": state.reason,
        "round": state.round,
        "account": _account(state.account),
        "evaluation": _account(state.evaluation),
        "seats": [_seat(seat) for seat in state.seats],
        "passed": sorted(state.passed),
        "lost": state.lost,
        "fills": state.fills,
        "rollbacks": state.rollbacks,
        "quarantined": sorted(state.quarantined),
        "releases": sorted(state.releases.items()),
        "paused": state.paused,
        "model": state.model,
        "models": state.models,
        "started_at": state.started_at,
        "ended_at": state.ended_at,
        "metric": state.metric.model_dump(),
        "summary": state.summary,
        "planned": state.planned,
        "verdict": state.verdict and state.verdict.model_dump(mode="json"),
        "unfit": list(state.unfit.items()),
        "proposed": state.proposed,
        "waiting": state.waiting,
    }


def decode(document: dict[str, Any], arrays: bytes) -> RunState:
    """Return the state of a document and its arrays.

    Raises:
        ValueError: The document or the arrays are damaged.
    """
    try:
        loaded = load_memory(arrays)
        method = _unnamed(_METHOD, loaded)
        if method is None:
            raise ValueError("the run's alpha is missing")
        return RunState(
            **{
                **document,
                "method": method,
                "account": _load_account(document["account"]),
                "evaluation": _load_account(document["evaluation"]),
                "seats": tuple(
                    _load_seat(seat, _unnamed(f"seat{seat['slot']}", loaded))
                    for seat in document["seats"]
                ),
                "passed": frozenset(document["passed"]),
                "quarantined": frozenset(document["quarantined"]),
                "releases": dict(document["releases"]),
                "defence": _below(_DEFENCE, loaded),
                "models": tuple(document["models"]),
                "unfit": dict(document["unfit"]),
                "metric": MetricReport.model_validate(document["metric"]),
                "verdict": _load_verdict(document["verdict"]),
                "proposed": _load_candidates(document["proposed"]),
                "waiting": _load_candidates(document["waiting"]),
            }
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError) as exc:
        raise ValueError(f"not a run's state: {exc}") from exc


def _load_verdict(document: dict[str, Any] | None) -> Verdict | None:
    return None if document is None else Verdict.model_validate_json(json.dumps(document))


def _load_candidates(document: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(slot), str(text)) for slot, text in document)


def _named(prefix: str, state: State) -> dict[str, Any]:
    memory = {f"{prefix}/memory/{key}": value for key, value in state.memory.items()}
    return {f"{prefix}/alpha": state.alpha, **memory}


def _unnamed(prefix: str, arrays: Memory) -> State | None:
    alpha = arrays.get(f"{prefix}/alpha")
    return None if alpha is None else State(alpha=alpha, memory=_below(f"{prefix}/memory", arrays))


def _below(prefix: str, arrays: Memory) -> dict[str, Any]:
    start = f"{prefix}/"
    return {
        key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)
    }


def _account(account: Account) -> dict[str, Any]:
    cap = account.cap
    return {
        "cap": cap and {**cap.model_dump(), "usd": None if cap.usd is None else str(cap.usd)},
        "spent": account.spent.exact(),
        "leases": {key: value.exact() for key, value in account.leases.items()},
    }


def _load_account(document: dict[str, Any]) -> Account:
    cap = document["cap"]
    return Account(
        cap=None if cap is None else Budget.model_validate(cap),
        spent=Usage.model_validate(document["spent"]),
        leases={key: Usage.model_validate(value) for key, value in document["leases"].items()},
    )


def _seat(seat: Seat) -> dict[str, Any]:
    plain = {field.name: getattr(seat, field.name) for field in fields(seat)}
    del plain["local"]
    return {
        **plain,
        "calls": sorted(seat.calls),
        "sent": {attempt: worst.exact() for attempt, worst in seat.sent.items()},
        "used": seat.used.exact(),
        "curves": [curves.dump() for curves in seat.curves],
    }


def _load_seat(document: dict[str, Any], local: State | None) -> Seat:
    return Seat(
        **{
            **document,
            "calls": frozenset(document["calls"]),
            "sent": {
                attempt: Usage.model_validate(worst) for attempt, worst in document["sent"].items()
            },
            "used": Usage.model_validate(document["used"]),
            "losses": tuple(tuple(losses) for losses in document["losses"]),
            "curves": tuple(Curves.load(curves) for curves in document["curves"]),
            "local": local,
        }
    )
