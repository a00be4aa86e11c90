"""Runs that start from a known prompt or an earlier run."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.backends import predict
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend, pseudo_log_probs
from fedone_sdk.vocabulary import build_vocabulary

TEXT = "Say whether it is good:"


def spec_of(method: dict[str, Any], exchange: str, start: object) -> RunSpec:
    return RunSpec.model_validate(
        {
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {
                "length": 3,
                "vocabulary": {"kind": "list", "candidates": ["", " a", " b", " c"]},
                "start": start,
            },
            "method": {"num_samples": 6, "batch_size": 4, **method},
            "participation": {"exchange": exchange, "min_clients": 2},
            "rounds": 3,
            "evaluation": {"every": 0},
        }
    )


def better(inputs: Rendered, words: tuple[str, ...]) -> tuple[float, ...] | None:
    """A model whose answer depends on the label only if the text is present."""
    text = "".join(part.text for part in inputs)
    if text.startswith(TEXT):
        return (-0.1, -3.0) if "bad" in text else (-3.0, -0.1)
    return pseudo_log_probs(inputs, words)


def rows(count: int) -> tuple[dict[str, Any], ...]:
    return tuple({"text": f"{('bad', 'good')[n % 2]} {n}", "label": n % 2} for n in range(count))


def federation_of(spec: RunSpec) -> Federation:
    return Federation(
        spec=spec,
        shards=(rows(12), rows(10)),
        dev=rows(8),
        vocabulary=build_vocabulary(spec.prompt.vocabulary, (), wanted=spec.prompt.start_tokens),
        reused_rows=False,
    )


@pytest.mark.parametrize(
    ("method", "exchange"),
    [
        ({"name": "gs-bdpl", "tau": 1.0}, "alpha"), ({"name": "gs-bdpl", "tau": 1.0}, "losses"),
        ({"name": "bdpl"}, "alpha"), ({"name": "thompson"}, "losses"),
        ({"name": "random"}, "losses"),
    ],
)  # fmt: skip
async def test_a_text_is_what_is_bettered(method: dict[str, Any], exchange: str) -> None:
    spec = spec_of(method, exchange, TEXT)
    store = MemoryStore()
    await store.open()
    result = await simulate(federation_of(spec), backend=ScriptedBackend(better), store=store)
    assert result.status == "completed"
    measured = await predict(ScriptedBackend(better), spec.task, TEXT, rows(8), 4)
    assert result.metric.before == measured.metric == 1.0
    assert result.metric.no_prompt is not None
    assert result.metric.no_prompt < 1.0
    # Nothing is better than the text, so that it is what is left.
    assert TEXT in result.prompt.text


async def test_a_run_starts_from_an_earlier_one() -> None:
    """Its alpha, as shares: the new run begins with the prompt that the old one ended with."""
    first = await simulate(
        federation_of(spec_of({"name": "thompson"}, "losses", None)),
        backend=ScriptedBackend(better),
    )
    shares = [{token: 0.8} for token in first.prompt.tokens]
    federation = federation_of(spec_of({"name": "gs-bdpl", "tau": 1.0}, "alpha", shares))
    second = await simulate(federation, backend=ScriptedBackend(better))
    assert second.metric.before is not None
    untrained = await predict(
        ScriptedBackend(better), federation.spec.task, first.prompt.text, rows(8), 4
    )
    assert second.metric.before == untrained.metric
