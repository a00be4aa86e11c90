"""Page of a retuning: the effect of a change of model on a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedone_sdk.budget import Usage
from fedone_sdk.messages import RunResult, Spread
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.reports.retuned import Holds, MeasuredPrompt, Retuned

if TYPE_CHECKING:
    from fedone_sdk.local.retune import RetunePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RetunePage:
    """Contents of the page, as text.

    Attributes:
        title: Title, with the prompt's name.
        facts: Rows of name and text.
        metric: Title of the measurements.
        measured: Rows of prompt, metric, 95 % interval, label bias.
        gains: Rows of comparison, difference, 95 % interval.
        costs: Rows of unit, expected, at most, spent.
        verdict: Sentences: whether the old prompt holds, the new one's gain, a recommendation.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    metric: str
    measured: tuple[tuple[str, str, str, str], ...]
    gains: tuple[tuple[str, str, str], ...]
    costs: tuple[tuple[str, str, str, str], ...]
    verdict: tuple[str, ...]


def retune_page(
    artefact: PromptArtefact, found: Retuned, plan: RetunePlan, result: RunResult
) -> RetunePage:
    """Composes the page."""
    stopped = result.status in ("stopped", "failed")
    return RetunePage(
        title=f"{artefact.name}: from {found.old_model or 'a model that is not known'} "
        f"to {found.new_model}",
        facts=(
            ("old prompt", repr(artefact.prompt.text)),
            ("new prompt so far" if stopped else "new prompt", repr(found.prompt.text)),
            (
                "run",
                f"{result.run_id}, {result.status}"
                f"{f' ({result.reason})' if result.reason else ''}, {result.rounds} rounds",
            ),
        ),
        metric=f"{found.metric}{' (less is better)' if found.metric == 'loss' else ''} on "
        f"{found.examples} dev examples",
        measured=tuple(_measured(found)),
        gains=tuple(_gains(found)),
        costs=tuple(_costs(plan, result)),
        verdict=tuple(_verdict(found, result)),
    )


def retune_html(page: RetunePage) -> str:
    """Return the page as HTML."""
    from fedone_sdk.reports.render import html_page

    return html_page("retune.html.j2", page=page)


def _measured(found: Retuned) -> Iterator[tuple[str, str, str, str]]:
    rows: dict[str, MeasuredPrompt | None] = {
        "old prompt, on the old model": found.on_old_model,
        "no prompt": found.no_prompt,
        "no prompt, bias found for it": found.no_prompt_biased,
        "old prompt, as it is": found.old_prompt,
        "old prompt, bias found again": found.old_prompt_biased,
        "new prompt": found.new_prompt,
    }
    for name, one in rows.items():
        if one is not None:
            yield (
                name,
                "-" if one.value is None else f"{one.value:.3f}",
                "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
                "-" if one.bias is None else _numbers(one.bias),
            )


def _gains(found: Retuned) -> Iterator[tuple[str, str, str]]:
    bare = "" if found.no_prompt_biased is None else ", bias found for it"
    rows = {
        "old prompt as it is, new model less old model": found.change,
        "old prompt with its bias found again, new model less old model": found.change_biased,
        "old prompt, bias found again less old bias": found.gain_by_bias,
        "new prompt less old prompt as it is": found.gain_as_it_is,
        "new prompt less old prompt, bias found again": found.gain_biased,
        f"new prompt less no prompt{bare}": found.gain_over_none,
    }
    for name, one in rows.items():
        if one is not None:
            yield name, f"{one.value:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}"


def _costs(plan: RetunePlan, result: RunResult) -> Iterator[tuple[str, str, str, str]]:
    spent, evaluation = result.spent, result.evaluation
    training = plan.training_queries
    yield "training queries", str(training), str(training), str(spent.queries)
    evaluated = str(plan.evaluation_queries)
    yield "evaluation queries", evaluated, evaluated, str(evaluation.queries)
    for name in ("requests", "prompt_tokens", "completion_tokens"):
        amounts = (getattr(usage, name) for usage in (plan.expected, plan.most, spent))
        expected, most, used = map(str, amounts)
        yield name.replace("_", " "), expected, most, used
    expected, most = (_usd(one, priced=plan.run.priced) for one in (plan.expected, plan.most))
    yield "USD", expected, most, _usd(spent, priced=result.priced)


def _verdict(found: Retuned, result: RunResult) -> Iterator[str]:
    yield f"The old prompt as it is: {_held(found.holds, found.change)}."
    if found.old_prompt_biased is not None:
        again = _held(found.holds_biased, found.change_biased)
        yield f"The old prompt with its label bias found again: {again}."
    if found.gain is not None and not found.same_prompt:
        kept = "as it is" if found.keep == "as_it_is" else "with its label bias found again"
        yield f"The new prompt, next to the old one {kept}: {_spread(found.gain)}."
    if not found.prompt.text:
        bias = (
            ""
            if found.prompt.bias is None
            else f", with the label bias {_numbers(found.prompt.bias)}"
        )
        yield f"The new prompt is no prompt{bias}."
    over = found.gain_over_none
    if found.prompt.text and over is not None and over.low <= 0.0 and found.conclusion != "unknown":
        seen = "worse" if over.high < 0.0 else "no gain is seen"
        bare = "" if found.no_prompt_biased is None else " with its own label bias"
        yield f"The new prompt, next to no prompt{bare}: {_spread(over)}, {seen}."
    yield f"Conclusion: {_conclusion(found, result)}."


def _held(holds: Holds, change: Spread | None) -> str:
    if change is None:
        return "not known whether it holds, as a measurement or its interval is missing"
    if holds == "no":
        return f"does not hold, {_spread(change)} next to the old model"
    if change.low > 0.0:
        return f"holds and is better, {_spread(change)} next to the old model"
    return f"holds, no loss is seen: {_spread(change)} next to the old model"


def _conclusion(found: Retuned, result: RunResult) -> str:
    again = found.old_prompt_biased
    kept = "the old prompt as it is"
    if found.keep == "biased" and again is not None and again.bias is not None:
        kept = f"the old prompt with the label bias {_numbers(again.bias)} found again"
    if result.status in ("stopped", "failed"):
        return "none yet, the run is not over"
    if found.same_prompt:
        return f"keep {kept}; tuning found no better one"
    if found.conclusion == "take_new":
        return "take the new prompt"
    if found.conclusion == "keep_old":
        return f"keep {kept}"
    if found.conclusion == "no_difference":
        return f"no difference seen between the two; keep {kept}, or measure on more examples"
    return "none, as a measurement or its interval is missing"


def _spread(found: Spread) -> str:
    return f"{found.value:+.3f} (95 % {found.low:+.3f} to {found.high:+.3f})"


def _numbers(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:.4g}" for value in values)


def _usd(usage: Usage, *, priced: bool) -> str:
    return f"{usage.usd:.4f}" if priced else "unknown"
