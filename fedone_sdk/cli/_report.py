"""A run's result for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedone_sdk.cli._output import Output, money, plural, size
from fedone_sdk.messages import COMPARED

if TYPE_CHECKING:
    from fedone_sdk.messages import RunDevices, RunResult, Verdict


def exit_code(result: RunResult) -> int:
    """0 for a success, 130 for a run that Ctrl-C stopped.

    1 for a run that failed or is paused, or whose caps did not suffice for a round.
    """
    if result.status == "stopped":
        return 1 if _paused(result) else 130
    return int(result.status == "failed" or not result.rounds)


def is_resumable(result: RunResult) -> bool:
    """Whether the same command continues the run: it is paused, or Ctrl-C stopped it."""
    return result.status == "stopped" and (_paused(result) or result.reason == "interrupted")


def _paused(result: RunResult) -> bool:
    """Whether the run is paused until a setting, key or quota changes."""
    return (result.reason or "").startswith("paused: ")


def print_result(output: Output, result: RunResult, *, num_clients: int | None = None) -> None:
    """Print the results and the cost of a run."""
    spent, cap = result.spent, result.cap.queries
    usd = "" if result.cap.usd is None else f" of {result.cap.usd:g}"
    reason = f" ({result.reason})" if result.reason else ""
    took_part = {name for entry in result.history for name in entry.client_id.split(",")}
    prompt, verdict = result.prompt, result.verdict
    facts = {
        "status": f"{result.status}{reason}, {plural(result.rounds, 'round')}",
        "verdict": None if verdict is None else verdict.text,
        "prompt so far" if result.status == "stopped" else "prompt": repr(prompt.text),
        **{f"  {name}": repr(text) for name, text in (prompt.slots or {}).items()},
        "label words": None
        if prompt.labels is None
        else ", ".join(map(repr, prompt.labels.values())),
        "label bias": None
        if prompt.bias is None
        else f"{bias_text(prompt.bias)}, belongs to the prompt",
        # In one line, for runs without a verdict's table.
        f"{result.metric.name} on dev": None
        if verdict is not None and verdict.standings
        else ", ".join(
            f"{COMPARED[one.name].lower()} {_number(one.value)}" for one in result.standings
        ),
        "queries": f"{spent.queries}{'' if cap is None else f' of {cap}'}"
        f" (evaluation: {result.evaluation.queries} more)",
        "billed requests": f"{spent.requests} (of them evaluation: {result.evaluation.requests}), "
        f"{spent.prompt_tokens} prompt tokens, USD {money(spent, priced=result.priced)}{usd}",
        "cache hits": f"{result.cache.hits}",
        "clients": f"{len(took_part)}"
        f"{'' if num_clients is None else f' of {num_clients}'} took part",
        "devices": None if result.devices is None else devices_text(result.devices),
        "traffic": f"{size(result.communication.upload_bytes)} up, "
        f"{size(result.communication.download_bytes)} down",
        "time": f"{result.wall_s:.1f} s",
        "alpha_sha256": result.alpha_sha256,
        "censored": f"{result.censoring.censored} of {result.censoring.values} label "
        "log-probabilities are only upper bounds"
        if result.censoring.censored
        else None,
    }
    output.heading(f"{result.name} (run {result.run_id}, seed {result.seed})")
    output.facts({name: text for name, text in facts.items() if text is not None})
    if verdict is not None and verdict.standings:
        output.console.print()
        output.table(*_standings(result.metric.name, verdict))


def _standings(metric: str, verdict: Verdict) -> tuple[list[str], list[list[str]]]:
    """Return the prompts that a verdict compares, as a table: header and rows."""
    header = [f"{metric} on {verdict.examples} dev rows", "value", "95 %", "tuned gains", "95 %"]
    return header, [
        [
            COMPARED[one.name],
            _number(one.value),
            "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
            *(
                ("-", "-")
                if one.gain is None
                else (f"{one.gain.value:+.3f}", f"{one.gain.low:+.3f} to {one.gain.high:+.3f}")
            ),
        ]
        for one in verdict.standings
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def devices_text(devices: RunDevices) -> str:
    """Return the number of devices that fit a run, and the reasons of those that do not."""
    reasons = "; ".join(f"{one.reason} ({one.devices})" for one in devices.unfit)
    counts = f"{devices.connected} connected, {devices.fit} fit"
    return f"{counts}: {reasons}" if reasons else counts


def bias_text(bias: Sequence[float]) -> str:
    """Return a label bias as text: one number per label, in the form of ``--bias``."""
    return ",".join(f"{value:.4g}" for value in bias)


def print_exchanges(output: Output, results: Mapping[str, RunResult]) -> None:
    """Print results side by side."""
    runs = list(results.values())
    rows = {
        "rounds": [f"{run.rounds}" for run in runs],
        "queries": [_of_cap(run.spent.queries, run.cap.queries) for run in runs],
        "cache hits": [f"{run.cache.hits}" for run in runs],
        "billed requests": [f"{run.spent.requests}" for run in runs],
        "federated, up": [size(run.communication.upload_bytes) for run in runs],
        "federated, down": [size(run.communication.download_bytes) for run in runs],
        "federated, messages": [f"{run.communication.messages}" for run in runs],
        "gateway, up": [size(run.gateway.upload_bytes) for run in runs],
        "gateway, down": [size(run.gateway.download_bytes) for run in runs],
        "gateway, messages": [f"{run.gateway.messages}" for run in runs],
        "alpha_sha256": [run.alpha_sha256[:12] for run in runs],
    }
    output.table(["exchange", *results], ([name, *cells] for name, cells in rows.items()))


def _of_cap(spent: int, cap: int | None) -> str:
    return f"{spent}" if cap is None else f"{spent}/{cap}"
