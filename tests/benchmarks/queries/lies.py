"""Clients that lie: honest ones whose losses are changed on their way to the aggregator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.messages import LossesUpdate
from fedone_sdk.messages.ndarray import from_wire, to_wire

if TYPE_CHECKING:
    from fedone_sdk.client import Transport
    from fedone_sdk.messages import AlphaUpdate, Receipt
    from fedone_sdk.simulation.devices import Between

__all__ = ["LIES", "Lie", "lying"]

_Numbers = NDArray[np.float64]

Lie = Callable[[_Numbers, np.random.Generator], _Numbers]
"""Losses, one per prompt along the first axis, into what is told of them."""

LIES: Mapping[str, Lie] = {
    # The best prompt is called the worst, with honest mean and spread.
    "inverted": lambda losses, rng: 2.0 * losses.mean(axis=0) - losses,
    "amplified": lambda losses, rng: losses.mean(axis=0) - 10.0 * (losses - losses.mean(axis=0)),
    "random": lambda losses, rng: rng.uniform(0.0, 2.0, losses.shape) * losses.mean(axis=0),
}
"""By their names. Curves of losses over classes and biases are told as losses are."""

_LARGEST = 1e6


def lying(lie: str, share: float, *, num_clients: int, seed: int) -> Between:
    """What makes a share of the clients of a losses exchange lie.

    Args:
        lie: Of `LIES`.
        share: Of the clients, in [0, 1].
        num_clients: K.
        seed: Draws who lies.
    """
    liars = set(random.Random(seed).sample(range(num_clients), round(share * num_clients)))

    def between(number: int, line: Transport) -> Transport:
        if number not in liars:
            return line
        rng = np.random.default_rng([seed, number])
        told: Any = _Lying(line, LIES[lie], rng)
        found: Transport = told
        return found

    return between


class _Lying:
    """A line to the aggregator that changes updates; all else passes."""

    def __init__(self, line: Transport, lie: Lie, rng: np.random.Generator) -> None:
        self._line, self._lie, self._rng = line, lie, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        assert isinstance(message, LossesUpdate)
        changed: dict[str, Any]
        if message.by_class is None:
            changed = {"losses": tuple(self._told(np.array(message.losses)).tolist())}
        else:
            # A lie that contradicts itself is refused: the losses are those of the curves.
            curves = self._told(from_wire(message.by_class).astype(np.float64)).astype(np.float32)
            unbiased = curves[:, :, curves.shape[2] // 2].astype(np.float64)
            losses = np.average(unbiased, axis=1, weights=message.class_counts)
            changed = {"losses": tuple(losses.tolist()), "by_class": to_wire(curves)}
        told = message.model_copy(update=changed)
        return await self._line.update(credential, assignment_id, told)

    def _told(self, losses: _Numbers) -> _Numbers:
        return np.clip(self._lie(losses, self._rng), -_LARGEST, _LARGEST)
