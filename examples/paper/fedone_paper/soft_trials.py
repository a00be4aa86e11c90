"""Trials that tune soft prompts: their federation, its measurements and its counts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fedone_paper.federated import Tuning, note_reached, run_trial, tuning_federation
from fedone_paper.settings import Settings
from fedone_paper.soft_model import Measured, SoftModel
from fedone_paper.soft_prompts import BBT, Alpha, Method, Round, Trained, rounds
from fedone_sdk.algorithms import alpha_sha256, stream_seed
from fedone_sdk.data import draw_minibatch
from fedone_sdk.evaluation.engine import Result, Trial, TrialFunction, Workspace
from fedone_sdk.task import Example

_FLOAT32 = 4

_KINDS: Mapping[str, Any] = {"prompt-tuning": "embeddings", "p-tuning-v2": "key_values"}

SOFT = ("bbt", *_KINDS)
"""The methods that tune a soft prompt, by name."""


def soft_trial(
    key: str, settings: Settings, tuning: Tuning, run: TrialFunction | None = None, **options: Any
) -> Trial:
    """Return the trial of a run whose method is one of `SOFT`; raises like `run_trial`.

    Data, seed and rounds are as for a prompt of words; the option ``soft`` is the method.
    """
    soft, plain = dict(tuning.method), {"name": "gs-bdpl"}
    if "batch_size" in soft:
        plain["batch_size"] = soft["batch_size"]
    tuning = replace(tuning, method=plain)
    return run_trial(key, settings, tuning, run or run_soft, soft=soft, **options)


def run_soft(options: dict[str, Any], workspace: Workspace) -> Result:
    """Tune a soft prompt, and measure it as `run_tuning` measures a prompt of words.

    Returns:
        The fields of `run_tuning` that the tables use. ``communication`` has the bytes of alpha,
        and ``wall_s`` the seconds of the rounds, without measurements.
    """
    tuned = _Tuned(options, workspace)
    task, dev, evaluation = tuned.task, tuned.federation.dev, tuned.federation.spec.evaluation
    part = sorted(tuned.drawn("evaluation", evaluation.examples)) if dev else []

    def metric(alpha: Alpha | None, rows: Sequence[Example]) -> float | None:
        return tuned.measure(alpha, rows, tuned.method.batch_size).metric if rows else None

    untrained = tuned.method.init()
    before = {"no_prompt": metric(None, dev), "before": metric(untrained, dev)}
    curve = [{"round": -1, "queries": 0, "metric": before["before"]}]
    for number, done in enumerate(tuned.rounds()):
        if dev and evaluation.every and (number + 1) % evaluation.every == 0:
            value = metric(done.alpha, [dev[index] for index in part])
            curve.append({"round": number, "queries": tuned.spent, "metric": value})
    alpha = done.alpha
    sent = tuned.visits * alpha.size * _FLOAT32
    return {
        **tuned.facts(),
        "metric": {"name": task.metric, **before, "after": metric(alpha, dev)},
        "curve": curve,
        "cache": {"hits": 0},
        "communication": {"upload_bytes": sent, "download_bytes": sent},
        "alpha_sha256": alpha_sha256(alpha),
        "wall_s": tuned.wall_s,
    }


def run_soft_to_target(options: dict[str, Any], workspace: Workspace) -> Result:
    """Tune a soft prompt until the deployable prompt reaches its targets (`run_to_target`)."""
    tuned, probing = _Tuned(options, workspace), options["probing"]
    spec, method = tuned.federation.spec, tuned.method
    drawn = tuned.drawn("probe-prompt-rows", probing["prompt_rows"])
    rows = [tuned.federation.dev[index] for index in drawn]
    prompts = getattr(method, "num_samples", 1) * method.local_steps
    every = max(1, probing["queries"] // (spec.participation.clients_per_round * prompts))
    curve: list[dict[str, Any]] = []
    reached: dict[str, int | None] = dict.fromkeys(probing["gains"])

    def probe(number: int, alpha: Alpha) -> bool:
        """Measure; return whether all targets are reached."""
        found = tuned.measure(alpha, rows, len(rows))
        measured = {"prompt_loss": found.loss, "prompt_metric": found.metric}
        curve.append({"round": number, "queries": tuned.spent, **measured})
        return note_reached(reached, curve, probing["gains"])

    over = probe(0, method.init())
    for number, done in enumerate(tuned.rounds(), 1):
        if number % every == 0 or number == spec.rounds:
            over = probe(number, done.alpha)
        if over:
            break
    return {**tuned.facts(), "curve": curve, "reached": reached, "probe_queries": len(curve)}


class _Tuned:
    """A federation that tunes a soft prompt, and the history of its rounds."""

    def __init__(self, options: dict[str, Any], workspace: Workspace) -> None:
        self.federation = tuning_federation(options, workspace)
        spec, settings = self.federation.spec, dict(options["soft"])
        self.task = spec.task
        self.model = SoftModel(workspace.inputs["model"])
        common: dict[str, Any] = {
            "model": self.model,
            "task": spec.task,
            "prompt_len": spec.prompt.length,
        }
        name = settings.pop("name")
        self.method: Method = (
            BBT(**common, **settings)
            if name == "bbt"
            else Trained(**common, **settings, kind=_KINDS[name], seed=spec.seed)
        )
        self.losses: list[float] = []
        self.queries: list[int] = []
        self.visits, self.wall_s = 0, 0.0

    @property
    def spent(self) -> int:
        """Training queries so far."""
        return sum(self.queries)

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of the run."""
        spec, began = self.federation.spec, time.monotonic()
        clients = spec.participation.clients_per_round
        endless = rounds(self.method, self.federation.shards, clients, spec.seed)
        for done in islice(endless, spec.rounds):
            self.wall_s += time.monotonic() - began
            self.visits += done.visits
            self.losses.append(done.loss)
            self.queries.append(done.queries)
            yield done
            began = time.monotonic()

    def measure(self, alpha: Alpha | None, rows: Sequence[Example], batch_size: int) -> Measured:
        """Measure the soft prompt of an alpha; None means no prompt."""
        soft = None if alpha is None else self.method.soft(alpha)
        return self.model.measure(self.task, rows, batch_size, soft)

    def drawn(self, purpose: str, count: int) -> list[int]:
        """Draw dev rows."""
        seed = stream_seed(self.federation.spec.seed, purpose, 0)
        return draw_minibatch(len(self.federation.dev), count, seed)

    def facts(self) -> Result:
        """Return the fields that the results of all trials have."""
        spec = self.federation.spec
        return {
            "seed": spec.seed,
            "status": "completed" if len(self.losses) == spec.rounds else "stopped",
            "rounds": len(self.losses),
            "losses": self.losses,
            "queries_per_round": self.queries,
            "spent": {"queries": self.spent},
            "model": self.model.fingerprint,
            "reused_rows": self.federation.reused_rows,
            "num_clients": len(self.federation.shards),
        }


def count_soft(options: dict[str, Any], workspace: Workspace) -> Result:
    """Count the visits, the size of alpha and the queries of a run, from its shapes.

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
