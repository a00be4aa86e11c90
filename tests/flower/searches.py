"""The searches of the tests, and how they end without Flower."""

from __future__ import annotations

import asyncio

from fedone_flower.task import POSITIONS, TASK, WORDS, shard

from fedone_sdk.algorithms import Algorithm, Space, alpha_sha256, make_method, stream, stream_seed
from fedone_sdk.backends import predict
from fedone_sdk.data import draw_minibatch
from fedone_sdk.testing import ScriptedBackend

QUERIES, BATCH, SAMPLES = 21, 4, 4


def search(name: str) -> Algorithm:
    """A search over the example's candidates."""
    space = Space.repeated(POSITIONS, len(WORDS))
    return make_method(name, space=space, num_samples=SAMPLES, seed=0)


def without_flower(name: str) -> str:
    """The digest of alpha after the same search with the same answers."""

    async def tuned() -> str:
        method, rows = search(name), shard(0, 8)
        state = method.init()
        async with ScriptedBackend() as model:
            for number in range(1, QUERIES // SAMPLES + 1):
                drawn = draw_minibatch(len(rows), BATCH, stream_seed(0, "minibatch", number))
                asked = method.ask(state, stream(stream_seed(0, "prompts", number)))
                found = [
                    await predict(
                        model, TASK, WORDS.text(prompt), [rows[at] for at in drawn], BATCH
                    )
                    for prompt in asked.prompts
                ]
                state = method.tell(state, asked, [one.mean_loss or 0.0 for one in found])
        return alpha_sha256(state.alpha)

    return asyncio.run(tuned())
