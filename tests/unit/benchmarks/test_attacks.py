from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from fedone_sdk.budget import Usage
from fedone_sdk.messages import LossesUpdate
from fedone_sdk.messages.ndarray import from_wire, to_wire
from fedone_sdk.messages.update import Scored
from tests.benchmarks.queries.attacks import ATTACKS, attacked

LOSSES = (0.25, 0.5, 1.5)
CURVES = np.arange(3 * 2 * 9, dtype=np.float32).reshape(3, 2, 9) / 16


class Line:
    """Keeps what reaches the aggregator."""

    name = "line"

    def __init__(self) -> None:
        self.sent: list[LossesUpdate] = []

    async def update(self, credential: str, assignment_id: str, message: LossesUpdate) -> str:
        self.sent.append(message)
        return "receipt"


def told(attack: str, share: float = 1.0, **fields: Any) -> LossesUpdate:
    line: Any = Line()
    changed: Any = attacked(attack, share, num_clients=5, seed=3)(0, line)
    assert changed.name == "line"  # all else passes
    message = LossesUpdate(
        num_examples=8, scored=Scored(scored=8), usage=Usage(), model="m", losses=LOSSES, **fields
    )
    assert asyncio.run(changed.update("c", "a", message)) == "receipt"
    (found,) = line.sent
    assert isinstance(found, LossesUpdate)
    return found


def test_inverted_losses_keep_mean_and_spread() -> None:
    found = told("inverted").losses
    assert np.argsort(found).tolist() == np.argsort(LOSSES)[::-1].tolist()
    assert np.mean(found) == pytest.approx(np.mean(LOSSES))
    assert np.std(found) == pytest.approx(np.std(LOSSES))


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_change_curves(attack: str) -> None:
    found = told(attack, by_class=to_wire(CURVES), class_counts=(4, 4))
    assert found.by_class is not None
    curves = from_wire(found.by_class)
    assert (curves.shape, curves.dtype) == (CURVES.shape, CURVES.dtype)
    assert not np.allclose(curves, CURVES)
    if attack == "inverted":
        np.testing.assert_allclose(curves.mean(axis=0), CURVES.mean(axis=0), rtol=1e-5)
        assert (curves[0] > curves[2]).all()
    assert found.class_counts == (4, 4)


def test_only_a_share_of_the_clients_lies() -> None:
    line: Any = Line()
    between = attacked("inverted", 0.2, num_clients=10, seed=0)
    assert sum(between(number, line) is not line for number in range(10)) == 2
    assert told("inverted", 0.0).losses == LOSSES
