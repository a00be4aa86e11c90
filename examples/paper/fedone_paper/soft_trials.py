"""Trials of soft prompts: a federation in one process, its measurements and its counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fedone_paper.federated import Tuning, run_trial, tuning_federation
from fedone_paper.settings import Settings
from fedone_paper.soft_model import SoftModel
from fedone_paper.soft_prompts import BBT, Alpha, Method, Trained, rounds
from fedone_sdk.algorithms import alpha_sha256, stream_seed
from fedone_sdk.data import draw_minibatch
from fedone_sdk.evaluation.engine import Result, Trial, TrialFunction, Workspace
from fedone_sdk.local import Federation
from fedone_sdk.task import Example

_FLOAT32 = 4

_KINDS: Mapping[str, Any] = {"prompt-tuning": "embeddings", "p-tuning-v2": "key_values"}

SOFT = ("bbt", *_KINDS)
"""The methods that tune a soft prompt, by name."""


def soft_trial(
    key: str,
    settings: Settings,
    tuning: Tuning,
    run: TrialFunction | None = None,
    **options: Any,
) -> Trial:
    """Return the trial of a run whose method is one of `SOFT`; errors as of `run_trial`.

    The run's data, seed and rounds are those of a run of words; the method is the option ``soft``.
    """
    soft, plain = dict(tuning.method), {"name": "gs-bdpl"}
    if "batch_size" in soft:
        plain["batch_size"] = soft["batch_size"]
    options = {"soft": soft, "held_out": tuning.held_out, **options}
    return run_trial(key, settings, replace(tuning, method=plain), run or run_soft, **options)


def run_soft(options: dict[str, Any], workspace: Workspace) -> Result:
    """Tune a soft prompt, and measure it as `run_tuning` measures a prompt of words.

    Returns:
        The fields of `run_tuning` that the tables use. ``communication`` are the bytes of alpha,
        and ``wall_s`` the seconds of the rounds alone.
    """
    return _tuned(tuning_federation(options, workspace), options, workspace)


def _tuned(federation: Federation, options: dict[str, Any], workspace: Workspace) -> Result:
    spec, task, dev = federation.spec, federation.spec.task, federation.dev
    model, method = _method(federation, options, workspace)
    size, alpha = spec.method.batch_size, method.init()
    every, part = spec.evaluation.every, _rows(federation, "evaluation", spec.evaluation.examples)

    def metric(alpha: Alpha | None, rows: Sequence[Example]) -> float | None:
        soft = None if alpha is None else method.soft(alpha)
        return model.measure(task, rows, size, soft).metric if rows else None

    found: dict[str, Any] = {"no_prompt": metric(None, dev), "before": metric(alpha, dev)}
    curve = [{"round": -1, "queries": 0, "metric": found["before"]}]
    losses: list[float] = []
    queries: list[int] = []
    visits, wall_s, began = 0, 0.0, time.monotonic()
    for number, done in enumerate(_rounds(federation, method)):
        wall_s += time.monotonic() - began
        alpha, visits = done.alpha, visits + done.visits
        losses.append(done.loss)
        queries.append(done.queries)
        if dev and every and (number + 1) % every == 0:
            point = {"round": number, "queries": sum(queries), "metric": metric(alpha, part)}
            curve.append(point)
        began = time.monotonic()
    found["after"] = metric(alpha, dev)
    return {
        **_facts(federation, losses, queries, model),
        "status": "completed",
        "metric": {"name": task.metric, **found},
        "curve": curve,
        "cache": {"hits": 0},
        "communication": dict.fromkeys(
            ("upload_bytes", "download_bytes"), visits * alpha.size * _FLOAT32
        ),
        "alpha_sha256": alpha_sha256(alpha),
        "wall_s": wall_s,
    }


def run_soft_to_target(options: dict[str, Any], workspace: Workspace) -> Result:
    """Tune a soft prompt until the deployable prompt reaches the targets; see `run_to_target`."""
    federation, probing = tuning_federation(options, workspace), options["probing"]
    spec, gains = federation.spec, probing["gains"]
    model, method = _method(federation, options, workspace)
    rows = _rows(federation, "probe-prompt-rows", probing["prompt_rows"], ordered=False)
    clients = spec.participation.clients_per_round
    prompts = getattr(method, "num_samples", 1) * method.local_steps
    every = max(1, probing["queries"] // (clients * prompts))
    curve: list[dict[str, Any]] = []
    reached: dict[str, int | None] = dict.fromkeys(gains)

    def probe(number: int, queries: int, alpha: Alpha) -> bool:
        """Measure; return whether all targets are reached."""
        found = model.measure(spec.task, rows, len(rows), method.soft(alpha))
        measured = {"prompt_loss": found.loss, "prompt_metric": found.metric}
        curve.append({"round": number, "queries": queries, **measured})
        for name, gain in gains.items():
            if reached[name] is None and curve[-1][name] <= curve[0][name] - gain:
                reached[name] = queries
        return bool(reached) and None not in reached.values()

    losses: list[float] = []
    queries: list[int] = []
    over = probe(0, 0, method.init())
    for number, done in enumerate(_rounds(federation, method), 1):
        losses.append(done.loss)
        queries.append(done.queries)
        if number % every == 0 or number == spec.rounds:
            over = probe(number, sum(queries), done.alpha)
        if over:
            break
    return {
        **_facts(federation, losses, queries, model),
        "status": "completed" if len(losses) == spec.rounds else "stopped",
        "curve": curve,
        "reached": reached,
        "probe_queries": len(curve),
    }


def count_soft(options: dict[str, Any], workspace: Workspace) -> Result:
    """Count the visits, the numbers of alpha and the queries of a run, which its shapes determine.

    Args:
        options: ``method``, ``prompt_len``, ``hidden_size``, ``num_layers``, ``rounds`` and
            ``clients_per_round``.
        workspace: Not used.
    """
    name, n = options["method"]["name"], options["prompt_len"]
    numbers = {
        "bbt": BBT.intrinsic_dim,
        "prompt-tuning": n * options["hidden_size"],
        "p-tuning-v2": 2 * options["num_layers"] * n * options["hidden_size"],
    }[name]
    visits = options["rounds"] * options["clients_per_round"]
    samples = options["method"].get("num_samples", BBT.num_samples) if name == "bbt" else 0
    return {
        "status": "completed",
        "rounds": options["rounds"],
        "visits": visits,
        "elements_down": visits * numbers,
        "elements_up": visits * numbers,
        "queries": visits * samples,
    }


def _method(
    federation: Federation, options: dict[str, Any], workspace: Workspace
) -> tuple[SoftModel, Method]:
    spec, settings = federation.spec, dict(options["soft"])
    name = settings.pop("name")
    model = SoftModel(workspace.inputs["model"], options["run"]["backend"]["device"])
    common = {"model": model, "task": spec.task, "prompt_len": spec.prompt.length, **settings}
    if name == "bbt":
        return model, BBT(**common)
    return model, Trained(**common, kind=_KINDS[name], seed=spec.seed)


def _rounds(federation: Federation, method: Method) -> Any:
    spec = federation.spec
    endless = rounds(method, federation.shards, spec.participation.clients_per_round, spec.seed)
    return islice(endless, spec.rounds)


def _rows(
    federation: Federation, purpose: str, count: int, *, ordered: bool = True
) -> list[Example]:
    """Draw dev rows."""
    dev = federation.dev
    if not dev:
        return []
    drawn = draw_minibatch(len(dev), count, stream_seed(federation.spec.seed, purpose, 0))
    return [dev[index] for index in (sorted(drawn) if ordered else drawn)]


def _facts(
    federation: Federation, losses: list[float], queries: list[int], model: SoftModel
) -> Result:
    """Return the fields that all trials here have."""
    return {
        "seed": federation.spec.seed,
        "rounds": len(losses),
        "losses": losses,
        "queries_per_round": queries,
        "spent": {"queries": sum(queries)},
        "model": model.fingerprint,
        "reused_rows": federation.reused_rows,
        "num_clients": len(federation.shards),
    }
