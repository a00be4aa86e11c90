"""The verdict: fair baselines, intervals, and the sentence."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from fedone_sdk.budget import Price, Usage
from fedone_sdk.evaluation.outcomes import Outcomes, Which
from fedone_sdk.evaluation.verdict import (
    examples_needed,
    judge,
    no_prompt_biased,
    sentence,
    with_lengths,
)
from fedone_sdk.messages import PromptReport, Spread, Verdict
from fedone_sdk.task import LOG_ZERO, TaskSpec

TARGETS = (0, 1) * 100


def task(**changes: Any) -> TaskSpec:
    return TaskSpec.model_validate(
        {"template": "{prompt} {text}", "labels": {0: " no", 1: " yes"}, **changes}
    )


def answers(share: float, which: Which = "after", *, seed: int = 0) -> Outcomes:
    """Predictions of which this share is right."""
    right = np.random.default_rng(seed).random(len(TARGETS)) < share
    predicted = [t if good else 1 - t for t, good in zip(TARGETS, right, strict=True)]
    return Outcomes(which=which, predicted=tuple(predicted), targets=TARGETS)


def leaning(lean: float) -> Outcomes:
    """No prompt of a good model with a bias towards one label, nats."""
    noise = np.random.default_rng(1).normal(size=len(TARGETS))
    odds = [2.0 * (2 * t - 1) + 0.5 * e + lean for t, e in zip(TARGETS, noise, strict=True)]
    rows = [(float(-np.logaddexp(0, o)), float(-np.logaddexp(0, -o))) for o in odds]
    return Outcomes(
        which="no_prompt",
        predicted=tuple(int(no < yes) for no, yes in rows),
        targets=TARGETS,
        log_probs=tuple(rows),
    )


def judged(bare: float, tuned: float, *, bare_seed: int = 0, seed: int = 0) -> Verdict:
    """The verdict on answers of which these shares are right."""
    no_prompt = answers(bare, "no_prompt", seed=bare_seed)
    return judge(task(), {"no_prompt": no_prompt, "after": answers(tuned, seed=seed)})


def values(verdict: Verdict) -> dict[str, float | None]:
    return {one.name: one.value for one in verdict.standings}


def said(verdict: Verdict, usd: str = "0.0045", metric: str = "accuracy") -> str:
    return sentence(verdict, metric, Usage(queries=60, usd=Decimal(usd)), priced=True)


def test_what_a_label_bias_alone_gains_is_no_gain_of_the_prompt() -> None:
    """Of a model that leans, the empty prompt with a bias beats no prompt without one."""
    bare = leaning(6.0)
    plain = no_prompt_biased(task(), bare, (0.0, -6.0))
    assert plain is not None
    tuned = plain.outcomes.model_copy(update={"which": "after"})
    verdict = judge(task(), {"no_prompt": bare, "after": tuned}, plain_bias=(0.0, -6.0), empty=True)
    found = values(verdict)
    assert (found["chance"], found["no_prompt"]) == (0.5, 0.5)
    assert found["no_prompt_biased"] == found["tuned"] == 1.0
    assert (verdict.conclusion, verdict.against) == ("no_prompt", "no_prompt")
    assert (verdict.bias_from, verdict.bias) == ("training", (0.0, -6.0))
    assert verdict.standings[2].gain is not None
    assert verdict.standings[2].gain.value == 0.0
    assert said(verdict).startswith(
        "the model without a prompt, but with a label bias, is deployed, because no better prompt "
        "was found: +50.0 points over no prompt (95 % +4"
    )
    wrong = no_prompt_biased(task(), leaning(0.0), (0.0, 60.0))
    assert wrong is not None
    tuned = wrong.outcomes.model_copy(update={"which": "after"})
    measured = {"no_prompt": leaning(0.0), "after": tuned}
    worse = judge(task(), measured, plain_bias=(0.0, 60.0), empty=True)
    assert said(worse).endswith("; without the label bias the accuracy was better")
    bare_alone = judge(task(bias=(0.0, 1.0)), {"no_prompt": bare, "after": bare}, empty=True)
    assert said(bare_alone).startswith("the model without a prompt is deployed, because no better ")


def test_a_cross_fitted_bias_does_not_see_the_row_that_it_is_for() -> None:
    bare = leaning(6.0)
    plain = no_prompt_biased(task(), bare, None)
    assert plain is not None
    assert (plain.bias, plain.bias_from) == (None, "dev")
    assert sum(p == t for p, t in zip(plain.outcomes.predicted, TARGETS, strict=True)) == 200
    # Of answers that say nothing of the labels, a bias can only fit the rows it was fitted on.
    rng = np.random.default_rng(3)
    noise = tuple((0.0, float(value)) for value in rng.normal(size=200))
    blind = Outcomes(which="no_prompt", predicted=(0,) * 200, targets=TARGETS, log_probs=noise)
    changed = (*noise[:50], (0.0, 40.0), *noise[51:])
    other = blind.model_copy(update={"log_probs": changed})
    before, after = (no_prompt_biased(task(), one, None) for one in (blind, other))
    assert before is not None
    assert after is not None
    # Row 50 has another answer, so the biases of the other folds change, not its own fold's.
    order = sorted(range(200), key=lambda place: (TARGETS[place], place))
    own = [place for place in order[order.index(50) % 5 :: 5] if place != 50]
    assert [before.outcomes.predicted[p] for p in own] == [after.outcomes.predicted[p] for p in own]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([(-1.0, -0.5)] * 9, {}),  # too few
        ([(0.0, LOG_ZERO)] * 20, {}),  # a model that shows only what it writes
        ([(-1.0, -0.5)] * 20, {"bias": (0.0, 1.0)}),  # a bias of the user's
        ([], {}),
    ],
)
def test_where_no_bias_can_be_fitted(
    rows: Sequence[tuple[float, float]], changes: dict[str, Any]
) -> None:
    targets = TARGETS[: len(rows)] if rows else TARGETS
    same, shown = (0,) * len(targets), tuple(rows)
    bare = Outcomes(which="no_prompt", predicted=same, targets=targets, log_probs=shown)
    assert no_prompt_biased(task(**changes), bare, None) is None


def test_worth_keeping() -> None:
    bare, before = answers(0.6, "no_prompt", seed=1), answers(0.55, "before", seed=2)
    verdict = judge(task(), {"no_prompt": bare, "before": before, "after": answers(0.9)})
    assert list(values(verdict)) == ["chance", "no_prompt", "untrained", "tuned"]
    gain = verdict.standings[1].gain
    assert gain is not None
    assert verdict.conclusion == "worth_keeping"
    low, high = 100 * gain.low, 100 * gain.high
    assert said(verdict) == (
        f"{100 * gain.value:+.1f} points over no prompt (95 % {low:+.1f} to {high:+.1f}, "
        "over 99 % likely to help) for USD 0.0045: worth keeping"
    )
    assert "for 60 queries: worth" in said(verdict, usd="0")
    unknown = sentence(verdict, "accuracy", Usage(queries=1), priced=False)
    assert "for 1 query at an unknown price: worth" in unknown


def test_the_price_of_a_prompts_length_at_every_call() -> None:
    verdict = judged(0.6, 0.8)
    prompts = {"no_prompt": "", "tuned": "x" * 134}
    for price, ending in {
        None: "worth keeping",
        Price(prompt=0, completion=0): "worth keeping",
        Price(prompt="0.1", completion=1): "worth keeping; the prompt's 34 tokens cost USD 3.40 "
        "per million calls (without a prompt: USD 0.00)",
    }.items():
        found = with_lengths(verdict, prompts, price)
        assert said(found).endswith(ending)
        tokens = {one.name: one.tokens for one in found.standings}
        assert tokens == {"chance": None, "no_prompt": 0, "tuned": 34}


@pytest.mark.parametrize(("share", "shown"), [(0.78, True), (0.6, False)])
def test_the_cheapest_prompt_is_shown_within_the_interval_of_the_best(
    share: float, shown: bool
) -> None:
    found = {"no_prompt": answers(0.5, "no_prompt"), "cheapest": answers(share, "cheapest")}
    verdict = judge(task(), {**found, "after": answers(0.8)})
    prompts = {"no_prompt": "", "cheapest": "x" * 40, "tuned": "x" * 134}
    price = Price(prompt="0.1", completion=1)
    report = PromptReport(text="x" * 40, tokens=("x" * 40,))
    text = said(verdict := with_lengths(verdict, prompts, price, {"cheapest": report}))
    ending = "USD 0.00); a shorter prompt that may be as good has 10 tokens for USD 1.00"
    assert (ending in text) is shown
    assert (report in [one.prompt for one in verdict.standings]) is shown


def test_an_inconclusive_verdict_has_the_number_of_rows_that_show_such_a_gain() -> None:
    verdict = judged(0.8, 0.795, seed=1)
    gain = verdict.standings[1].gain
    assert gain is not None
    assert gain.low < 0 < gain.value
    assert verdict.conclusion == "unclear"
    assert verdict.needed_examples is not None
    assert verdict.needed_examples > 2 * 200  # Less would have shown it already.
    share = f"{100 * gain.probability:.0f} %"
    assert said(verdict).endswith(
        f", {share} likely to help) for USD 0.0045, not distinguishable from luck; "
        f"{verdict.needed_examples:,} dev rows would show such a difference with 80 % power"
    )
    # Four of five samples of so many rows do.
    rng, shown = np.random.default_rng(0), 0
    less, most = answers(0.8).predicted, answers(0.795, seed=1).predicted
    pairs = list(zip(less, most, TARGETS, strict=True))
    for _ in range(40):
        drawn = [pairs[at] for at in rng.integers(len(pairs), size=verdict.needed_examples)]
        worse, better, targets = zip(*drawn, strict=True)
        bare = Outcomes(which="no_prompt", predicted=worse, targets=targets)
        after = Outcomes(which="after", predicted=better, targets=targets)
        more = judge(task(), {"no_prompt": bare, "after": after})
        shown += more.conclusion == "worth_keeping"
    assert 25 <= shown <= 39


@pytest.mark.parametrize(
    ("value", "error", "needed"),
    [
        (2.0, 2.0, None),  # within one standard error: its size is not known
        (0.0, 0.0, None),
        (2.0, 1.5, 450),  # 100 (2.80 x 1.5 / 2)^2
        (-2.0, 1.5, 450),
        (2.0, 0.5, 50),
    ],
)
def test_examples_needed(value: float, error: float, needed: int | None) -> None:
    found = Spread(value=value, low=-9.0, high=9.0, error=error, probability=0.5)
    assert examples_needed(100, found) == needed


def test_a_gain_within_noise_gets_no_number() -> None:
    verdict = judged(0.72, 0.8, bare_seed=1)
    assert (verdict.conclusion, verdict.needed_examples) == ("unclear", None)
    assert said(verdict).endswith("not distinguishable from luck")


def test_no_better_than_guessing() -> None:
    """Better than no prompt, but one answer for everything does as well."""
    targets = (0,) * 60 + (1,) * 40

    def of(which: Which, right: int) -> Outcomes:
        predicted = [t if at < right else 1 - t for at, t in enumerate(targets)]
        return Outcomes(which=which, predicted=tuple(predicted), targets=targets)

    outcomes = {"no_prompt": of("no_prompt", 20), "after": of("after", 58)}
    verdict = judge(task(), outcomes)
    assert (values(verdict)["chance"], verdict.examples) == (0.6, 100)
    failed = outcomes["after"].model_copy(update={"predicted": (None,) * 30 + (0,) * 70})
    assert judge(task(), {**outcomes, "after": failed}).examples == 70
    assert verdict.conclusion == "guessing"
    assert said(verdict).startswith(
        "no better than guessing: accuracy 0.580, and 0.600 with one answer for everything; +38.0"
    )
    deployed = said(judge(task(), outcomes, empty=True))
    assert deployed.endswith("; no better than one answer for everything (accuracy 0.600)")


def test_worse_than_no_prompt() -> None:
    verdict = judged(0.9, 0.7, bare_seed=1)
    assert verdict.conclusion == "worse"
    assert said(verdict).endswith("for USD 0.0045: worse than no prompt")


def test_the_fair_baseline_is_the_better_one() -> None:
    bare = leaning(0.0)  # A bias of -6 ruins it.
    verdict = judge(task(), {"no_prompt": bare, "after": answers(0.9)}, plain_bias=(0.0, -6.0))
    assert verdict.against == "no_prompt"


def test_less_loss_is_a_gain() -> None:
    def of(which: Which, mean: float) -> Outcomes:
        losses = tuple(np.random.default_rng(0).normal(mean, 0.1, size=len(TARGETS)).tolist())
        return Outcomes(which=which, predicted=TARGETS, targets=TARGETS, losses=losses)

    outcomes = {"no_prompt": of("no_prompt", 0.6), "after": of("after", 0.5)}
    verdict = judge(task(metric="loss"), outcomes)
    assert values(verdict)["chance"] == pytest.approx(np.log(2))
    assert verdict.conclusion == "worth_keeping"
    assert said(verdict, metric="loss").startswith("loss -0.100 against no prompt (95 % -0.100")


def test_a_metric_of_ones_own_has_no_interval() -> None:
    measured = {"no_prompt": answers(0.6, "no_prompt"), "after": answers(0.9)}
    verdict = judge(task(metric="costs:saved"), measured, measure=lambda true, predicted: 7.0)
    assert (verdict.conclusion, values(verdict)) == ("unknown", {"no_prompt": 7.0, "tuned": 7.0})
    text = said(verdict, metric="costs:saved")
    assert text.endswith("a metric of your own has no interval")


def test_results_on_other_rows_are_not_compared() -> None:
    fewer = answers(0.6, "no_prompt").on(range(150))
    verdict = judge(task(), {"no_prompt": fewer, "after": answers(0.9)})
    assert said(verdict).endswith("the two were not measured on the same dev rows")
