"""A gateway solves the devices' mean losses for their labels."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.aggregator import Service
from fedone_sdk.data import draw_minibatch
from fedone_sdk.messages import LossesUpdate, Score, Scores
from fedone_sdk.testing import ScriptedBackend
from tests.attacks import Succeeded, attack
from tests.runs import RecordingTransport, memory_client, run_spec, serving

Floats = NDArray[np.float64]

ROUNDS, NUM_SAMPLES, BATCH_SIZE, CLIP = 20, 5, 16, 2.0
LABELS = ROUNDS * BATCH_SIZE
_random = random.Random(0)
ROWS = [{"text": f"text {n}", "label": _random.randrange(2)} for n in range(64)]


class Gateway(RecordingTransport):
    """Keeps what the gateway answers."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.answers: list[Scores] = []

    async def score(self, credential: str, message: Score) -> Scores:
        answer = await super().score(credential, message)
        self.answers.append(answer)
        return answer


async def updates(privacy: dict[str, Any] | None) -> tuple[list[tuple[Floats, Floats]], Gateway]:
    """Run with one device.

    Returns:
        Per update the losses of each label, shape (I, B, 2), and the means that the device sends,
        shape (I,); and the gateway.
    """
    method = {"name": "random", "num_samples": NUM_SAMPLES, "batch_size": BATCH_SIZE}
    spec = run_spec(method=method, rounds=ROUNDS, privacy=privacy, calibration="none")
    async with serving(spec, backend=ScriptedBackend()) as service:
        gateway = Gateway(service)
        async with memory_client(service, data=ROWS, transport=gateway) as client:
            await client.run_forever()
    seen = []
    for answer, update in zip(gateway.answers, gateway.updates, strict=True):
        assert answer.log_probs is not None
        assert isinstance(update, LossesUpdate)
        log_probs = np.array(answer.log_probs.values()).reshape(answer.log_probs.shape)
        losses = np.logaddexp(log_probs[..., :1], log_probs[..., 1:]) - log_probs
        seen.append((losses, np.array(update.losses)))
    return seen, gateway


def solved(losses: Floats, means: Floats) -> NDArray[np.int64]:
    """Return the likeliest labels of a mini-batch, of all 2^B."""
    numbers = np.arange(2 ** losses.shape[1])[:, None]
    labels = (numbers >> np.arange(losses.shape[1])) & 1
    sums = losses[..., 0].sum(axis=1) + labels @ (losses[..., 1] - losses[..., 0]).T
    found: NDArray[np.int64] = labels[
        np.square(sums - means * losses.shape[1]).sum(axis=1).argmin()
    ]
    return found


async def found_labels(privacy: dict[str, Any] | None) -> int:
    """Return how many of the labels in all mini-batches a gateway finds."""
    seen, gateway = await updates(privacy)
    found = 0
    for (losses, means), work in zip(seen, gateway.works, strict=True):
        drawn = draw_minibatch(len(ROWS), BATCH_SIZE, work.minibatch_seed)
        if privacy is not None:
            losses = losses.clip(0.0, CLIP)
        found += int((solved(losses, means) == [ROWS[row]["label"] for row in drawn]).sum())
    return found


def multiplier_for(epsilon: float, releases: int = 1, delta: float = 1e-5) -> float:
    """Return the least noise multiplier whose releases cost at most `epsilon`."""
    low, high, accountant = 0.1, 1000.0, GaussianAccountant(delta)
    while high - low > 1e-6 * high:
        middle = math.sqrt(low * high)
        if accountant.epsilon(releases * middle**-2) > epsilon:
            low = middle
        else:
            high = middle
    return high


@attack("A gateway solves mean losses for labels", before="320 of 320 labels")
async def _solves(folder: Path) -> str:
    exact = await found_labels(None)
    assert exact == LABELS, "docs/explanation/privacy.md says that they can be computed"
    parts = [f"without privacy {exact} (documented)"]
    for epsilon in (8, 4, 1):
        multiplier = multiplier_for(epsilon)
        found = await found_labels({"clip": CLIP, "noise_multiplier": multiplier})
        # The best that anyone can do who knows all other labels, and four standard errors.
        most = NormalDist().cdf(0.5 / multiplier)
        if found > LABELS * most + 4 * math.sqrt(LABELS * most * (1 - most)):
            raise Succeeded(f"{found} of {LABELS} labels at epsilon {epsilon}")
        parts.append(f"at epsilon {epsilon} per update {found}")
    return ", ".join(parts) + f"; {LABELS // 2} by chance"
