"""Attacks: clients whose losses are changed on the way to the aggregator."""

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

__all__ = ["ATTACKS", "Attack", "attacked"]

_Numbers = NDArray[np.float64]

Attack = Callable[[_Numbers, np.random.Generator], _Numbers]
"""Losses, one per prompt along the first axis, into the reported losses."""

ATTACKS: Mapping[str, Attack] = {
    # The best prompt becomes the worst; mean and spread do not change.
    "inverted": lambda losses, rng: 2.0 * losses.mean(axis=0) - losses,
    "amplified": lambda losses, rng: losses.mean(axis=0) - 10.0 * (losses - losses.mean(axis=0)),
    "random": lambda losses, rng: rng.uniform(0.0, 2.0, losses.shape) * losses.mean(axis=0),
}
"""By name. Curves over classes and biases are changed like losses."""

_LARGEST = 1e6


def attacked(attack: str, share: float, *, num_clients: int, seed: int) -> Between:
    """Return a transport wrapper that attacks a losses exchange with a share of the clients.

    Args:
        attack: Of `ATTACKS`.
        share: Of the clients, in [0, 1].
        num_clients: K.
        seed: Draws the attackers.
    """
    attackers = set(random.Random(seed).sample(range(num_clients), round(share * num_clients)))

    def between(number: int, line: Transport) -> Transport:
        if number not in attackers:
            return line
        rng = np.random.default_rng([seed, number])
        wrapped: Any = _Attacked(line, ATTACKS[attack], rng)
        found: Transport = wrapped
        return found

    return between


class _Attacked:
    """A transport that changes updates and forwards all other calls."""

    def __init__(self, line: Transport, attack: Attack, rng: np.random.Generator) -> None:
        self._line, self._attack, self._rng = line, attack, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        assert isinstance(message, LossesUpdate)
        changed: dict[str, Any]
        if message.by_class is None:
            changed = {"losses": tuple(self._changed(np.array(message.losses)).tolist())}
        else:
            # The server refuses inconsistent updates, so the losses are those of the curves.
            curves = self._changed(from_wire(message.by_class).astype(np.float64)).astype(
                np.float32
            )
            unbiased = curves[:, :, curves.shape[2] // 2].astype(np.float64)
            losses = np.average(unbiased, axis=1, weights=message.class_counts)
            changed = {"losses": tuple(losses.tolist()), "by_class": to_wire(curves)}
        update = message.model_copy(update=changed)
        return await self._line.update(credential, assignment_id, update)

    def _changed(self, losses: _Numbers) -> _Numbers:
        return np.clip(self._attack(losses, self._rng), -_LARGEST, _LARGEST)
