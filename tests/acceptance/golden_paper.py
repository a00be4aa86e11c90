"""Numbers of the paper's quick trials, pinned: what a trial computes must not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

GOLDEN: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""By study and trial: `numbers` of runs with one worker on 2026-11-25, and with a fitted label
bias on 2026-11-26."""

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
    if isinstance(metric := found.get("metric"), dict):
        found["metric"] = {name: metric[name] for name in metric if name != "no_prompt_biased"}
    if "spent" in result:
        found["spent"] = result["spent"]["queries"]
    return {
        name: hashlib.sha256(json.dumps(value).encode()).hexdigest()
        if isinstance(value, list) and len(value) > _LONG
        else value
        for name, value in found.items()
    }


def _has_floats(value: object) -> bool:
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, float) for part in parts)


def check(
    name: str, results: Mapping[str, Mapping[str, Any]], *, rel_tol: float | None = None
) -> None:
    """Compare a study's results with the pinned numbers: exactly, or its floats to `rel_tol`."""
    pinned = GOLDEN.get(name, {})
    for key in results.keys() & pinned.keys():
        expected = pinned[key]
        if rel_tol is not None:
            expected = {
                field: pytest.approx(value, rel=rel_tol) if _has_floats(value) else value
                for field, value in expected.items()
            }
        assert numbers(results[key]) == expected, key
