"""Numbers of the paper's quick trials, pinned: what a trial computes must not change."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOLDEN: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""By study and trial: `numbers` of runs with one worker on 2026-11-25."""

_PINNED = (
    *("accuracy", "alpha_sha256", "bias", "curve", "demonstrations", "elements_down"),
    *("elements_up", "held_out_loss", "learning_rate", "losses", "mean_loss", "metric", "prompt"),
    *("queries", "queries_per_round", "rounds", "status", "visits"),
)
_LONG = 20
"""Longer lists are pinned by their digest."""


def numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is pinned of a trial's result, without times, requests and bytes."""
    if "reached" in result:  # how many rounds a stopped run still makes is a matter of time
        return {name: result[name] for name in ("curve", "reached")}
    found = {name: result[name] for name in _PINNED if name in result}
    if "spent" in result:
        found["spent"] = result["spent"]["queries"]
    return {
        name: hashlib.sha256(json.dumps(value).encode()).hexdigest()
        if isinstance(value, list) and len(value) > _LONG
        else value
        for name, value in found.items()
    }


def check(name: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the results of a study, or of some of its trials, with the pinned numbers."""
    pinned = GOLDEN.get(name, {})
    found = {key: numbers(results[key]) for key in results.keys() & pinned.keys()}
    differing = {
        (key, field): (found[key].get(field), value)
        for key in found
        for field, value in pinned[key].items()
        if not _is_same(found[key].get(field), value)
    }
    assert not differing, differing


def _is_same(found: Any, pinned: Any) -> bool:
    # Sums of torch depend on its threads.
    close = isinstance(found, float) and math.isclose(found, pinned, rel_tol=1e-4)
    return close or bool(found == pinned)
