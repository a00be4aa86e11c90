"""The calls of an edge client, made one by one on a service in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Enrol,
    LossesAssignment,
    LossesUpdate,
    Receipt,
    Score,
    Scored,
    Scores,
)
from fedone_sdk.messages.tensor import from_wire, to_wire
from fedone_sdk.stores import ClientRecord
from tests.runs import TOKEN

TEXTS = ({"text": "a first text"}, {"text": "a second text"})

Work = AlphaAssignment | LossesAssignment


async def enrol(service: Service, count: int = 1) -> list[ClientRecord]:
    """Enrol clients."""
    identities = [await service.access.enrol(TOKEN, Enrol()) for _ in range(count)]
    return [await service.access.authenticate(identity.credential) for identity in identities]


async def claim(service: Service, client: ClientRecord, **fields: Any) -> Work | None:
    """Return the work of a claim, which does not wait by default; None if there is none."""
    found = await service.work.claim(client, Claim(**{"num_examples": 5, "wait_s": 0, **fields}))
    return None if isinstance(found, RetryLater) else found


async def work_of(service: Service, client: ClientRecord, **fields: Any) -> LossesAssignment:
    """Return the work of a claim in the losses exchange, which there must be."""
    found = await claim(service, client, **fields)
    assert isinstance(found, LossesAssignment)
    return found


async def score(service: Service, client: ClientRecord, work: Work, **fields: Any) -> Scores:
    """Send two texts to the gateway."""
    message = Score(**{"assignment_id": work.assignment_id, "examples": TEXTS, **fields})
    body = message.model_dump_json().encode()
    return await service.work.score(client, message, hashlib.sha256(body).hexdigest())


def update_for(work: Work, **fields: Any) -> AlphaUpdate | LossesUpdate:
    """Return an update: losses of 0.5, 0.75, ..., or alpha times 1.25."""
    given: Mapping[str, Any] = {
        "num_examples": 5,
        "scored": Scored(scored=2),
        "usage": NOTHING,
        "model": "scripted",
    }
    if isinstance(work, LossesAssignment):
        losses = tuple(0.5 + 0.25 * index for index in range(work.leased_queries))
        return LossesUpdate(**{**given, "losses": losses, **fields})
    alpha = to_wire(from_wire(work.alpha) * np.float32(1.25))
    return AlphaUpdate(**{**given, "alpha": alpha, "mean_loss": 0.5, **fields})


async def update(service: Service, client: ClientRecord, work: Work, **fields: Any) -> Receipt:
    """Send the update of `update_for`."""
    return await service.work.update(
        client, work.assignment_id, update_for(work, **fields), "ab" * 32
    )


class Device:
    """One enrolled client.

    Attributes:
        work: Of its last claim that got some.
    """

    work: Work

    def __init__(self, service: Service, client: ClientRecord) -> None:
        self.service, self.client = service, client

    async def claim(self) -> Work | None:
        found = await claim(self.service, self.client)
        if found is not None:
            self.work = found
        return found

    async def score(self, **fields: Any) -> Scores:
        return await score(self.service, self.client, self.work, **fields)

    async def refused(self, **fields: Any) -> ProblemError:
        """Return the refusal of a call to the gateway."""
        with pytest.raises(ProblemError) as excinfo:
            await self.score(**fields)
        return excinfo.value

    async def update(self, **fields: Any) -> None:
        await update(self.service, self.client, self.work, **fields)


async def device_of(service: Service) -> Device:
    """Enrol one client."""
    (client,) = await enrol(service)
    return Device(service, client)
