"""A run's stored state with every optional part."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import arrays_of, encode_document
from fedone_sdk.aggregator.rounds.seats import assign, fill
from fedone_sdk.algorithms import dump_memory
from fedone_sdk.spec import RunSpec


@cache
def _stored() -> tuple[str, bytes]:
    spec = RunSpec.model_validate(
        {
            "name": "run",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2},
            "participation": {"exchange": "losses", "clients_per_round": 2, "min_clients": 2},
            "budget": {"queries": 1000, "usd": "12.5"},
            "rounds": 3,
        }
    )
    machine = RoundMachine("run", spec, vocab_size=2)
    state = machine.handle(machine.initial_state(), 1_000.0, fill, available={0: 5, 1: 7}).state
    state = machine.handle(state, 1_001.0, assign, client=0, assignment_id="work-0").state
    return encode_document(state), dump_memory(arrays_of(state))


def working_state() -> tuple[dict[str, Any], bytes]:
    """The document and the arrays of a run with one seat offered and one at work."""
    document, arrays = _stored()
    return json.loads(document), arrays
