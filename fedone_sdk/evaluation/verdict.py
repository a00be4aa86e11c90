"""The verdict of a run: whether tuning improved the metric, with intervals and a sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from fedone_sdk.algorithms.label_bias import fitted_bias
from fedone_sdk.backends.judge import Pair
from fedone_sdk.budget import Price, Usage
from fedone_sdk.evaluation.intervals import difference, interval
from fedone_sdk.evaluation.outcomes import Outcomes, Which
from fedone_sdk.losses import label_loss, predicted
from fedone_sdk.messages import Compared, Preference, PromptReport, Spread, Standing, Verdict
from fedone_sdk.messages.prompt_report import Conclusion
from fedone_sdk.metrics import METRICS, MetricFunction, evaluate, metric_text
from fedone_sdk.task import (
    LOG_ZERO,
    Bias,
    Example,
    LogProbs,
    Score,
    TaskSpec,
    TextPrompt,
    target_of,
)
from fedone_sdk.vocabulary import CHARS_PER_TOKEN

_TIE = 0.5  # A judge returns this number if neither of two texts is better.
_FOLDS = 5
_MIN_ROWS = 10
"""Least number of answered dev rows to which a label bias is fitted."""

_POWER = 1.959964 + 0.841621
"""A 5 % test finds a difference of this many standard errors with 80 % power."""

_OVER: Mapping[Compared, str] = {"no_prompt": "no prompt", "no_prompt_biased": "a label bias alone"}


class Plain(NamedTuple):
    """The results of the model without a prompt, but with a label bias.

    Attributes:
        bias: The bias, nats; None if each fold of the dev rows has its own bias.
        bias_from: The data that the bias was fitted on (`Verdict.bias_from`).
    """

    outcomes: Outcomes
    bias: Bias | None
    bias_from: Literal["training", "dev"]


def no_prompt_biased(task: TaskSpec, bare: Outcomes, plain_bias: Bias | None) -> Plain | None:
    """Return the results of the model without a prompt, but with a label bias.

    They are computed from `bare`, the answers without a prompt. If the training fitted a bias to
    "no prompt" (`plain_bias`), it is used. Otherwise the dev rows are split into 5 folds,
    stratified by label, and each fold uses the bias that is best on the other folds.

    Returns:
        The results; None for a task without labels or with a fixed bias, for a model without
        log-probabilities, or for fewer than 10 rows.
    """
    shown = (
        sum(value > LOG_ZERO for value in row) > 1 for row in bare.log_probs if row is not None
    )
    if task.bias is not None or not any(shown):
        return None
    if plain_bias is not None:
        biases: Sequence[Bias | None] = [plain_bias] * len(bare.log_probs)
        return Plain(_with_biases(task, bare, biases), plain_bias, "training")
    fitted = _cross_fit_biases(bare, len(task.labels))
    return None if fitted is None else Plain(_with_biases(task, bare, fitted), None, "dev")


def judge(
    task: TaskSpec,
    outcomes: Mapping[Which, Outcomes],
    *,
    plain_bias: Bias | None = None,
    empty: bool = False,
    measure: MetricFunction | None = None,
) -> Verdict:
    """Compare the tuned prompt with a constant answer, "no prompt" and the untrained prompt.

    `plain_bias` is the label bias of "no prompt" from training, and `empty` says whether the tuned
    prompt is "no prompt".
    """
    after, bare = outcomes["after"], outcomes.get("no_prompt")
    compared: dict[Compared, Outcomes] = {}
    plain: Plain | None = None
    if (guess := _majority_baseline(task, after)) is not None:
        compared["chance"] = guess
    if bare is not None:
        compared["no_prompt"] = bare
        plain = no_prompt_biased(task, bare, plain_bias)
        if plain is not None:
            compared["no_prompt_biased"] = plain.outcomes
    if "before" in outcomes:
        compared["untrained"] = outcomes["before"]
    if "cheapest" in outcomes:
        compared["cheapest"] = outcomes["cheapest"]
    compared["tuned"] = after
    standings = {name: _standing(task, name, one, after, measure) for name, one in compared.items()}
    if "cheapest" in standings and not _within(
        task.metric, standings["cheapest"].value, standings["tuned"].interval
    ):
        del standings["cheapest"]
    against: Compared | None = "no_prompt" if "no_prompt" in standings else None
    if not empty:
        against = _best_baseline(task.metric, standings)
    over = None if against is None else standings[against].gain
    over_chance = standings["chance"].gain if "chance" in standings else None
    rows = sum(one is not None for one in after.predicted or after.losses)
    conclusion = "no_prompt" if empty else _conclude(over, over_chance)
    return Verdict(
        conclusion=conclusion,
        source="dev",
        examples=rows,
        standings=tuple(standings.values()),
        against=against,
        bias=None if plain is None else plain.bias,
        bias_from=None if plain is None else plain.bias_from,
        needed_examples=_needed(rows, over, over_chance) if conclusion == "unclear" else None,
    )


def preference(
    pairs: Sequence[Pair | None], tuned: Sequence[str | None], plain: Sequence[str | None]
) -> Preference | None:
    """Return how often a judge prefers `tuned` to `plain`; None if no row was compared."""
    compared = [
        (pair, len(tuned[row] or "") - len(plain[row] or ""))
        for row, pair in enumerate(pairs)
        if pair is not None
    ]
    wins = [fmean(pair) for pair, _ in compared]
    estimate = interval("loss", Outcomes(which="after", losses=tuple(wins)), 0)
    if estimate is None:
        return None
    by_length = [
        [win for win, (_, longer) in zip(wins, compared, strict=True) if longer * sign > 0]
        for sign in (1, -1)
    ]
    asked = [
        pair for row, pair in enumerate(pairs) if pair is not None and tuned[row] != plain[row]
    ]
    first = [shown for one, other in asked for shown in (one, 1.0 - other) if shown != _TIE]
    return Preference(
        rows=len(compared),
        asked=len(asked),
        wins=estimate.value,
        low=estimate.low,
        high=estimate.high,
        balanced=fmean(map(fmean, by_length)) if all(by_length) else None,
        agreement=fmean(one == other for one, other in asked) if asked else None,
        first=fmean(first) if first else None,
    )


def with_lengths(
    verdict: Verdict,
    prompts: Mapping[Compared, TextPrompt],
    price: Price | None,
    reports: Mapping[Compared, PromptReport] = MappingProxyType({}),
) -> Verdict:
    """Return the verdict with each prompt's length and cost, and with its text from `reports`."""
    standings = []
    for standing in verdict.standings:
        if (prompt := prompts.get(standing.name)) is not None:
            text = prompt if isinstance(prompt, str) else prompt.text
            tokens = math.ceil(len(text) / CHARS_PER_TOKEN)
            # Prices are per million tokens.
            usd = float(tokens * price.prompt) if price is not None and price.prompt else None
            also = {"tokens": tokens, "usd": usd, "prompt": reports.get(standing.name)}
            standing = standing.model_copy(update=also)
        standings.append(standing)
    return verdict.model_copy(update={"standings": tuple(standings)})


def not_measured(why: str) -> Verdict:
    """Return the verdict of a run without a measurement of its final prompt."""
    return Verdict(conclusion="not_measured", text=f"not measured: {why}")


def examples_needed(rows: int, gain: Spread) -> int | None:
    """Return about how many rows a test needs to show a difference like `gain`.

    The test has a level of 5 % and a power of 80 %. It needs a difference of `_POWER` standard
    errors, and the standard error falls with the square root of the number of rows. The result is
    rounded up to two digits. It is None if the difference is within one standard error.
    """
    if abs(gain.value) <= gain.error:
        return None
    needed = rows * (_POWER * gain.error / gain.value) ** 2
    step: int = 10 ** max(0, len(str(int(needed))) - 2)
    return math.ceil(needed / step) * step


def sentence(verdict: Verdict, metric: str, spent: Usage, *, priced: bool) -> str:
    """Return a verdict as a sentence, with the cost of the prompt if tokens have a price."""
    tuned, bare = verdict.standing("tuned"), verdict.standing("no_prompt")
    text = _concluded(verdict, metric, spent, priced=priced)
    if tuned is None or bare is None or tuned.usd is None or tuned.usd == bare.usd:
        return text
    text += (
        f"; the prompt's {tuned.tokens} tokens cost USD {tuned.usd:.2f} per million calls "
        f"(without a prompt: USD {bare.usd or 0:.2f})"
    )
    if (short := verdict.standing("cheapest")) is None:
        return text
    return (
        f"{text}; a shorter prompt that may be as good has {short.tokens} tokens for "
        f"USD {short.usd or 0:.2f} ({metric} {metric_text(short.value)})"
    )


def _concluded(verdict: Verdict, metric: str, spent: Usage, *, priced: bool) -> str:
    tuned = verdict.standing("tuned")
    base = None if verdict.against is None else verdict.standing(verdict.against)
    if tuned is None or base is None or verdict.against is None:
        return 'no verdict: "no prompt" was not measured'
    over, cost = _OVER[verdict.against], _cost(spent, priced=priced)
    reached = f"{metric} {metric_text(tuned.value)}"
    if base.gain is None:
        why = "the two were not measured on the same dev rows"
        if ":" in metric:
            why = "a metric of your own has no interval"
        values = f"{reached} for {cost}, against {metric_text(base.value)} with {over}"
        return f"{values}: no verdict, because {why}"
    summary = f"{_gained(metric, base.gain, over)} for {cost}"
    chance = verdict.standing("chance")
    one = "" if chance is None else metric_text(chance.value)
    if verdict.conclusion == "no_prompt":
        biased = verdict.standing("no_prompt_biased") is not None
        model = "the model without a prompt" + (", but with a label bias," if biased else "")
        better = f"; without the label bias the {metric} was better" if base.gain.value < 0 else ""
        if chance is not None and chance.gain is not None and chance.gain.value <= 0:
            summary += f"; no better than one answer for everything ({metric} {one})"
        return f"{model} is deployed, because no better prompt was found: {summary}{better}"
    if verdict.conclusion == "worth_keeping":
        return f"{summary}: worth keeping"
    if verdict.conclusion == "worse":
        return f"{summary}: worse than {over}"
    if verdict.conclusion == "guessing":
        summary = f"{one} with one answer for everything; {summary}"
        return f"no better than guessing: {reached}, and {summary}"
    needed = verdict.needed_examples
    would = "dev rows would show such a difference with 80 % power"
    tell = "" if needed is None else f"; {needed:,} {would}"
    if base.gain.low > 0:
        return f"{summary}, but not distinguishable from one answer for everything ({one}){tell}"
    return f"{summary}, not distinguishable from luck{tell}"


def _gained(metric: str, gain: Spread, over: str) -> str:
    likely = f"{_percent(gain.probability)} likely to help"
    if metric == "loss":
        ends = f"95 % {-gain.high:+z.3f} to {-gain.low:+z.3f}"
        return f"loss {-gain.value:+z.3f} against {over} ({ends}, {likely})"
    value, low, high = (100 * one for one in (gain.value, gain.low, gain.high))
    return f"{value:+z.1f} points over {over} (95 % {low:+z.1f} to {high:+z.1f}, {likely})"


def _percent(probability: float) -> str:
    if not 0.01 <= probability <= 0.99:
        return "under 1 %" if probability < 0.5 else "over 99 %"
    return f"{100 * probability:.0f} %"


def _cost(spent: Usage, *, priced: bool) -> str:
    queries = f"{spent.queries:,} {'query' if spent.queries == 1 else 'queries'}"
    if not priced:
        return f"{queries} at an unknown price"
    return f"USD {spent.usd:.4f}" if spent.usd else queries


def _conclude(gain: Spread | None, over_chance: Spread | None) -> Conclusion:
    if gain is None:
        return "unknown"
    if over_chance is not None and over_chance.value <= 0:
        return "guessing"
    if gain.high < 0:
        return "worse"
    clear = gain.low > 0 and (over_chance is None or over_chance.low > 0)
    return "worth_keeping" if clear else "unclear"


def _needed(rows: int, *gains: Spread | None) -> int | None:
    open_gains = [gain for gain in gains if gain is not None and gain.low <= 0 <= gain.high]
    needed = [examples_needed(rows, gain) for gain in open_gains]
    known = [number for number in needed if number is not None]
    return max(known) if known and len(known) == len(needed) else None


def measured(
    task: TaskSpec, one: Outcomes, measure: MetricFunction | None = None
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the metric of a measurement and its 95 % interval; a custom metric has no interval."""
    estimate = interval(task.metric, one, len(task.labels))
    if estimate is None:
        return _own_metric(task, one, measure), None
    return estimate.value, (estimate.low, estimate.high)


def gain(task: TaskSpec, better: Outcomes, worse: Outcomes) -> Spread | None:
    """Return the paired gain of a prompt over another, positive if better; None if rows differ."""
    if len({better.rows_crc32, worse.rows_crc32} - {None}) > 1:
        return None
    more, less = (worse, better) if task.metric == "loss" else (better, worse)
    estimate = difference(task.metric, [more], [less], len(task.labels))
    if estimate is None:
        return None
    return Spread(
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        error=estimate.error,
        probability=estimate.above,
    )


def label_bias(
    task: TaskSpec, rows: Sequence[LogProbs | Score | str | None], examples: Sequence[Example]
) -> Bias:
    """Return the label bias with the least cross-entropy, nats; zeros without log-probabilities."""
    scored = [
        (row, int(target_of(task, example)))
        for row, example in zip(rows, examples, strict=True)
        if row is not None and not isinstance(row, (Score, str))
    ]
    if not scored:
        return (0.0,) * len(task.labels)
    log_probs, targets = zip(*scored, strict=True)
    return tuple(fitted_bias(np.array(log_probs), np.array(targets)).tolist())


def rebiased(task: TaskSpec, outcomes: Outcomes, bias: Bias | None) -> Outcomes:
    """Return the outcomes with another label bias; unchanged if there are no log-probabilities."""
    if not outcomes.log_probs:
        return outcomes
    return _with_biases(task, outcomes, [bias] * len(outcomes.log_probs))


def _standing(
    task: TaskSpec, name: Compared, one: Outcomes, after: Outcomes, measure: MetricFunction | None
) -> Standing:
    value, ends = measured(task, one, measure)
    over = None if name == "tuned" or ends is None else gain(task, after, one)
    return Standing(name=name, value=value, interval=ends, gain=over)


def _within(metric: str, value: float | None, ends: tuple[float, float] | None) -> bool:
    """Return whether a value is inside an interval, or better than all values in it."""
    if value is None or ends is None:
        return False
    return value <= ends[1] if metric == "loss" else value >= ends[0]


def _own_metric(task: TaskSpec, one: Outcomes, measure: MetricFunction | None) -> float | None:
    pairs = [(p, t) for p, t in zip(one.predicted, one.targets, strict=True) if p is not None]
    if measure is None or not pairs:
        return None
    return evaluate(task.metric, [p for p, _ in pairs], [t for _, t in pairs], measure)


def _best_baseline(metric: str, standings: Mapping[Compared, Standing]) -> Compared | None:
    names: tuple[Compared, ...] = ("no_prompt_biased", "no_prompt")
    measured_names = [name for name in names if name in standings]
    if not measured_names or ":" in metric:
        return measured_names[0] if measured_names else None
    sign = -1.0 if metric == "loss" else 1.0
    return max(measured_names, key=lambda name: sign * (standings[name].value or 0.0))


def _majority_baseline(task: TaskSpec, after: Outcomes) -> Outcomes | None:
    """Return the outcomes of the best constant answer: a label, or (for a loss) label shares."""
    targets = after.targets
    if not targets:
        return None
    counts = Counter(targets)
    if task.metric == "loss":
        if task.loss != "cross_entropy":
            return None
        losses = tuple(-math.log(counts[target] / len(targets)) for target in targets)
        return Outcomes(
            which="no_prompt", targets=targets, predicted=(0,) * len(targets), losses=losses
        )
    if task.metric not in METRICS:
        return None
    best = max(
        range(len(task.labels)),
        key=lambda label: (evaluate(task.metric, [label] * len(targets), targets), counts[label]),
    )
    return Outcomes(which="no_prompt", targets=targets, predicted=(best,) * len(targets))


def _with_biases(task: TaskSpec, bare: Outcomes, biases: Sequence[Bias | None]) -> Outcomes:
    tasks = {bias: task.with_bias(bias) for bias in dict.fromkeys(biases)}
    rows = [(row, tasks[bias]) for row, bias in zip(bare.log_probs, biases, strict=True)]
    losses: tuple[float | None, ...] = ()
    if task.metric == "loss":
        losses = tuple(
            None if row is None else label_loss(one, row, target)
            for (row, one), target in zip(rows, bare.targets, strict=True)
        )
    answers = tuple(None if row is None else predicted(one, row) for row, one in rows)
    return bare.model_copy(update={"predicted": answers, "losses": losses, "log_probs": ()})


def _cross_fit_biases(bare: Outcomes, num_labels: int) -> list[Bias | None] | None:
    answered = [place for place, row in enumerate(bare.log_probs) if row is not None]
    if len(answered) < _MIN_ROWS:
        return None
    answered.sort(key=lambda place: (bare.targets[place], place))
    log_probs = np.array([bare.log_probs[place] for place in answered], dtype=np.float64)
    targets = np.array([bare.targets[place] for place in answered], dtype=np.int64)
    fold_of = np.arange(len(answered)) % _FOLDS
    biases: list[Bias | None] = [(0.0,) * num_labels] * len(bare.log_probs)
    for fold in range(_FOLDS):
        others = fold_of != fold
        bias = tuple(fitted_bias(log_probs[others], targets[others]).tolist())
        for place in np.flatnonzero(~others):
            biases[answered[place]] = bias
    return biases
