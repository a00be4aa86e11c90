"""What holds without LiteLLM; with it: tests/litellm."""

from __future__ import annotations

import inspect
from decimal import Decimal
from typing import Any

import pytest

from fedone_sdk.backends import LiteLLMBackend, litellm
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.litellm import price_of
from fedone_sdk.budget import Price, PriceTier
from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports.snippets import snippets
from fedone_sdk.spec import LiteLLMSpec, RunSpec, validate_spec
from tests.integration.tuned import SPEC


def test_the_options_are_those_of_the_spec() -> None:
    wrappers = {"kind", "cache", "record", "retry", "limits", "prices"}
    fields = {
        name: field.default
        for name, field in LiteLLMSpec.model_fields.items()
        if name not in wrappers
    }
    options = inspect.signature(LiteLLMBackend).parameters
    assert set(options) == set(fields)
    for name, default in fields.items():
        if name != "model":
            assert options[name].default == default


def test_a_row_of_its_table_becomes_a_price_with_tiers() -> None:
    row = {
        "input_cost_per_token": 1e-7,
        "input_cost_per_token_above_272k_tokens": 2e-7,
        "output_cost_per_token": 5e-7,
        "output_cost_per_token_above_272k_tokens": 7.5e-7,
        "cache_creation_input_token_cost": 1.25e-7,
        "cache_creation_input_token_cost_above_272k_tokens": 2.5e-7,
        "cache_read_input_token_cost_above_272k_tokens": 2e-8,
    }
    short = Price(prompt=Decimal("0.1"), completion=Decimal("0.5"))
    assert price_of(row, 1023, caches=True) == short
    written = PriceTier(above=1023, prompt=Decimal("0.125"), completion=Decimal("0.5"))
    price = price_of(row, 300_000, caches=True)
    assert price is not None
    assert price.tiers == (
        written,
        PriceTier(above=272_000, prompt=Decimal("0.25"), completion=Decimal("0.75")),
    )
    # Others write only what they are asked to, and nothing is asked here.
    price = price_of(row, 300_000)
    assert price is not None
    assert price.tiers == (
        PriceTier(above=272_000, prompt=Decimal("0.2"), completion=Decimal("0.75")),
    )
    assert price_of({"input_cost_per_token": 1e-7}, 1000) is None


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"fedone-sdk\[litellm\]"):
        build_backend(LiteLLMSpec(kind="litellm", model="openai/gpt-4o-mini"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "gpt-4o-mini"}, "model: must be PROVIDER/MODEL"),
        ({"model": "openai/x", "api_key": "sk-1"}, "api_key"),
        ({"model": "openai/x", "base_url": "http://me:hush@host"}, "base_url: must be http"),
        ({"model": "openai/x", "api": "completions"}, "api"),
    ],
)
def test_a_wrong_description_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec(LiteLLMSpec, {"kind": "litellm", **given}, source="run.yaml")
    assert said in str(caught.value)
    assert "sk-1" not in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_reports_programs_say_what_they_ask() -> None:
    backend = {"kind": "litellm", "model": "anthropic/m", "log_probs": False}
    task = {**SPEC["task"], "loss": "zero_one"}
    spec = RunSpec.model_validate({**SPEC, "task": task, "backend": backend})
    programs, note = snippets(spec, PromptReport(text="", tokens=()))
    assert "logprobs" not in programs[0].code
    assert "through LiteLLM" in note
    assert "JSON schema" in note
