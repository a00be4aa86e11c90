"""What each method asks and ends at on a table of real answers, at one seed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from fedone_sdk.algorithms import alpha_sha256, stream, stream_seed
from tests.benchmarks.slot_runs import CONTESTANTS, TABLES, Federation, Table

GOLDEN = {
    "thompson": ("73e53712f37434d6", None, [0, 1, 1, 3]),
    "thompson-no-halving": ("c0b17a13e200109f", None, [0, 1, 1, 3]),
    "thompson-told": ("933ebd19f39612f6", None, [2, 2, 1, 3]),
    "random": ("c217a01c9b46dd8e", None, [0, 1, 1, 3]),
    "tpe": ("67551a1f9c9c9b19", None, [3, 1, 1, 3]),
    "gs-bdpl-paper": ("eaf28adf744f07b6", "86fef5b048153bdb", [1, 0, 3, 2]),
    "gs-bdpl-best": ("213304468b217503", "0e309f3d7d026e3d", [0, 2, 1, 0]),
    "bdpl-paper": ("e02e23882d6072dd", "0e12ed127d366672", [0, 0, 3, 2]),
    "bdpl-best": ("21c5e809b7071a30", "7e8b447c982f4093", [3, 1, 1, 1]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_asks_and_ends_as_pinned(name: str) -> None:
    if name.startswith("tpe"):
        pytest.importorskip("optuna")
    assert outcome(name) == GOLDEN[name]


def outcome(name: str) -> tuple[str, str | None, list[int]]:
    """Run a method, and return digests of its prompts and alpha, and the deployable prompt.

    The alpha of a search is a posterior, whose last bits depend on the threads of BLAS.
    """
    table = Table(TABLES / "gemma-sst2.npz")
    contestant, seed, asks = CONTESTANTS[name], 7, 30
    federation = Federation(table=table, clients=8, batch_size=16, liars=1, seed=seed)
    method: Any = contestant.method(table, asks, seed)
    state, asked = method.init(), hashlib.sha256()
    for step in range(asks):
        rng = stream(stream_seed(seed, "prompts", step))
        holder = federation.holder(federation.client(step))
        candidates = method.ask(state, rng, method.wanted(state), holder)
        asked.update(candidates.prompts.astype("<i8").tobytes())
        losses: Any = (
            federation.by_class(candidates, step)
            if contestant.calibrates
            else federation.plain(candidates.prompts, step, own_bias=contestant.own_bias)
        )
        state = method.tell(state, candidates, losses)
    prompt = np.array(method.prompt(state)).tolist()
    alpha = alpha_sha256(state.alpha)[:16] if "bdpl" in name else None
    return asked.hexdigest()[:16], alpha, prompt
