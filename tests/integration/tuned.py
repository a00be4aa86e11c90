"""A small run, tuned in memory, for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedone_sdk.aggregator import exported_run
from fedone_sdk.backends import LLMBackend
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.reports import ReportedRun, read_export
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

ROWS = [{"text": f"row {number} is {'fine' if number % 2 else 'bad'}", "label": number % 2}
        for number in range(24)]  # fmt: skip

SPEC: dict[str, Any] = {
    "name": "small",
    "task": {"template": "{prompt} {text} It was", "labels": {0: " terrible", 1: " great"}},
    "prompt": {
        "length": 3,
        "vocabulary": {"kind": "list", "candidates": [" good", " bad", " really", " so"]},
    },
    "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 4, "alpha_min": 0.01},
    "participation": {"exchange": "losses"},
    "budget": {"queries": 48},
    "rounds": 8,
    "evaluation": {"every": 4, "examples": 8},
}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A run that is over: its result, its export and its store."""

    result: RunResult
    export: bytes
    store: MemoryStore

    @property
    def run(self) -> ReportedRun:
        """The run as reports read it."""
        return read_export(self.export)


async def tuned(
    *,
    backend: LLMBackend | None = None,
    watch: Callable[..., None] | None = None,
    store: MemoryStore | None = None,
    backend_spec: dict[str, Any] | None = None,
    **changes: Any,
) -> Tuned:
    """Tunes the small run, with some of its keys changed."""
    changes |= {} if backend_spec is None else {"backend": backend_spec}
    spec = RunSpec.model_validate({**SPEC, **changes})
    store = store or MemoryStore()
    vocabulary = spec.prompt.vocabulary
    federation = Federation(
        spec=spec,
        shards=(tuple(ROWS[:6]), tuple(ROWS[6:12])),
        dev=tuple(ROWS[12:]),
        vocabulary=Vocabulary(candidates=tuple(getattr(vocabulary, "candidates", ()))),
        reused_rows=False,
        score=(lambda written, example: 0.5) if spec.task.loss == "score" else None,
    )
    result = await simulate(
        federation, backend=backend or ScriptedBackend(), store=store, watch=watch
    )
    return Tuned(result=result, export=await exported_run(store, spec.name), store=store)


_kept: list[Tuned] = []


async def small() -> Tuned:
    """The small run as it is, tuned once for all tests."""
    if not _kept:
        _kept.append(await tuned())
    return _kept[0]
