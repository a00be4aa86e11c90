"""Random streams of a run, derived from its seed and never from the order of arrival."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from . import _checks

_WORD = 2**32


@lru_cache(maxsize=4096, typed=True)  # A round asks for each of its seeds several times.
def stream_seed(
    run_seed: int, purpose: str, round_number: int, client_index: int = 0, step: int = 0
) -> int:
    """Return the seed of one stream of a run.

    Args:
        run_seed: The run's seed, in [0, 2**64) like every number here.
        purpose: The use of the draws ("prompts", "selection", ...).
        round_number: The round.
        client_index: The client's enrolment index.
        step: The local step.

    Returns:
        A seed in [0, 2**53), which every JSON parser keeps exact.
    """
    digest = hashlib.sha256(purpose.encode()).digest()
    words: list[int] = []
    for name, value in {
        "run_seed": run_seed,
        "purpose": int.from_bytes(digest[:8], "little"),
        "round_number": round_number,
        "client_index": client_index,
        "step": step,
    }.items():
        high, low = divmod(_checks.integer(name, value), _WORD)
        if high >= _WORD:
            raise ValueError(f"{name} must be below 2**64, not {value}")
        # Always two words: SeedSequence concatenates numbers of any length, so that (2**32, 0) and
        # (0, 1) would otherwise collide.
        words += [low, high]
    # An array of words: a list is converted number by number.
    entropy = np.array(words, dtype=np.uint32)
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(state[0]) >> 11


def stream(seed: int) -> np.random.Generator:
    """Return the generator of a stream: Philox, the same on every platform."""
    seed = _checks.integer("seed", seed)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
