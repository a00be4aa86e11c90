"""Attacks by a server on the noise and the model of a device."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

from fedone_sdk.aggregator import Service
from fedone_sdk.client.noise import private_losses
from fedone_sdk.client.transport import Idle
from fedone_sdk.errors import MessageError
from fedone_sdk.messages import Claim, RunTask, Score, Scores, Tensor
from fedone_sdk.spec.sections import PrivacySpec, RequiredPrivacy
from fedone_sdk.testing import ScriptedBackend
from tests.attacks import Succeeded, attack
from tests.runs import RecordingTransport, memory_client, run_spec, serving

ROWS = [{"text": f"text {n}", "label": n % 2} for n in range(8)]


class Server(RecordingTransport):
    """Changes what a device gets, as JSON."""

    def __init__(self, service: Service, task: dict[str, Any], work: dict[str, Any]) -> None:
        super().__init__(service)
        self._task, self._work = task, work

    async def task(self, credential: str, run_id: str) -> RunTask:
        sent = (await super().task(credential, run_id)).model_dump(mode="json")
        try:
            return RunTask.model_validate(sent | self._task)
        except ValueError as exc:
            raise MessageError("the aggregator's answer is malformed") from exc

    async def claim(self, credential: str, message: Claim) -> Any:
        work = await super().claim(credential, message)
        return work if isinstance(work, Idle) else work.model_copy(update=self._work)


async def _turn(
    *, task: dict[str, Any] | None = None, work: dict[str, Any] | None = None
) -> tuple[Server, ScriptedBackend]:
    """Offer one assignment to a device with a model of its own."""
    model = ScriptedBackend()
    async with serving(run_spec()) as service:
        server = Server(service, task or {}, work or {})
        async with memory_client(service, data=ROWS, backend=model, transport=server) as client:
            await client.run_once()
    return server, model


@attack("A server's clip makes the noise underflow", before="100 of 100 labels at epsilon 0")
async def _underflows(folder: Path) -> str:
    wrong = [(5e-324, 1e3), (5e-324, 1e6), (1e-9, 1.0), (2.0, 1e-3), (1e6, 1e6), (1e300, 1e3)]
    for clip, multiplier in wrong:
        server, _ = await _turn(task={"privacy": {"clip": clip, "noise_multiplier": multiplier}})
        if server.updates:
            raise Succeeded(f"clip {clip:g}, multiplier {multiplier:g} are accepted")
    return f"{len(wrong)} of {len(wrong)} such runs declined"


@attack("A server reads labels in the low bits of noised losses", before="not bounded")
def _reads_low_bits(folder: Path) -> str:
    """At the least clip, from one example per release, whose loss is 0 or the clip."""
    spec, count, found = PrivacySpec(clip=1e-3, noise_multiplier=1.0), 2000, 0
    for n in range(count):
        (released,) = private_losses([[spec.clip * (n % 2)]], spec)
        if released != round(released / spec.clip * 2**30) * spec.clip / 2**30:
            raise Succeeded(f"{released} is no point of the grid, on which both losses are")
        found += (released > spec.clip / 2) == bool(n % 2)
    most = NormalDist().cdf(0.5)  # For anyone, at multiplier 1.
    if found > count * most + 4 * math.sqrt(count * most * (1 - most)):
        raise Succeeded(f"{found} of {count} labels at epsilon 4.4")
    return f"{found / count:.0%} of labels guessed at epsilon 4.4; {most:.0%} is the bound"


class _Extreme(RecordingTransport):
    """A gateway whose answer is impossible for the second label."""

    async def score(self, credential: str, message: Score) -> Scores:
        scores = await super().score(credential, message)
        assert scores.log_probs is not None
        shape = scores.log_probs.shape
        extreme = Tensor.pack([0.0, -3e38] * (shape[0] * shape[1]), shape, "float32")
        return scores.model_copy(update={"log_probs": extreme})


@attack(
    "A gateway's log-probabilities overflow for one label",
    before="every label at epsilon 0, with target alpha or in TypeScript",
)
async def _overflows(folder: Path) -> str:
    required = RequiredPrivacy(max_epsilon=8.0, unit="label")
    for exchange, target in (("losses", "losses"), ("alpha", "losses"), ("alpha", "alpha")):
        spec = run_spec(
            method={"batch_size": 1},
            participation={"exchange": exchange},
            privacy={"target": target, "clip": 2.0, "noise_multiplier": 4.0},
        )
        for label in (0, 1):
            async with serving(spec, backend=ScriptedBackend()) as service:
                server = _Extreme(service)
                options = {"label": "label", "fields": ("text",), "require_privacy": required}
                async with memory_client(
                    service,
                    data=[{"text": "a", "label": label}],
                    transport=server,
                    state_dir=folder / f"{exchange}-{target}-{label}",
                    **options,
                ) as client:
                    turn = await client.run_once()
            if turn.outcome != "worked":
                raise Succeeded(f"label {label} is declined with target {target}")
    return "an update with noise, whatever the label"
