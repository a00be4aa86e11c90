"""Random draws of a run: independent streams of random numbers, prompts, and clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .method_state import Floats, Ints

SELECTIONS = ("proportional", "uniform")

_WORD = 2**32


@lru_cache(maxsize=4096, typed=True)  # A round asks for each of its seeds several times.
def stream_seed(
    run_seed: int, purpose: str, round_number: int, client_index: int = 0, step: int = 0
) -> int:
    """Return the seed of a stream: an integer below 2**53, which JSON represents exactly.

    Args:
        run_seed: The run's seed. This and the other numbers must be in [0, 2**64).
        purpose: What the random numbers are for, such as "prompts" or "selection".
        round_number: The number of the round.
        client_index: The client's enrolment index.
        step: The number of the client's local step in the round.
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
        # SeedSequence concatenates numbers of any length. Two words for each number ensure that
        # (2**32, 0) and (0, 1) give different seeds.
        words += [low, high]
    # SeedSequence converts an array faster than a list.
    entropy = np.array(words, dtype=np.uint32)
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(state[0]) >> 11


def stream(seed: int) -> np.random.Generator:
    """Return a generator (Philox) whose numbers are the same on every platform."""
    seed = _checks.integer("seed", seed)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))


def softmax(logits: Floats) -> Floats:
    """Return the softmax of each row, shape (n, N)."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def draw_prompts(probabilities: Floats, num_samples: int, rng: np.random.Generator) -> Ints:
    """Draw prompts by the inverse CDF; position i gets, independently, a token j_i ~ Cat(p_i).

    Args:
        probabilities: Shape (n, N); rows need not sum exactly to 1.
        num_samples: The number of prompts, I.
        rng: The generator, from which I * n uniform numbers are drawn.

    Returns:
        Tokens (indices of candidates), shape (I, n).
    """
    cumulative = np.cumsum(probabilities, axis=1)
    # Rounding may leave the last sum below a uniform number. The division makes it exactly 1, which
    # no uniform number reaches. With side="right" a token of probability 0 is never drawn.
    cumulative /= cumulative[:, -1:]
    uniforms = rng.random((num_samples, len(cumulative)))
    indices = np.empty(uniforms.shape, dtype=np.int64)
    for position, row in enumerate(cumulative):
        indices[:, position] = np.searchsorted(row, uniforms[:, position], side="right")
    return indices


def argmax_prompt(alpha: NDArray[np.float32], seed: int) -> Ints:
    """Return the likeliest token of each position, shape (n,).

    Exact ties are broken at random by `seed`. A uniform (untrained) alpha therefore gives a random
    prompt, not n copies of token 0.
    """
    priority = stream(stream_seed(seed, "ties", 0)).random(alpha.shape)
    tied = alpha == alpha.max(axis=1, keepdims=True)
    return np.where(tied, priority, -1.0).argmax(axis=1).astype(np.int64)


def select(
    available: Mapping[int, int], count: int, *, rng: np.random.Generator, kind: str = "uniform"
) -> list[int]:
    """Draw clients, and return their enrolment indices in the order drawn.

    Args:
        available: The number of examples of each client, by enrolment index; the order of the
            clients has no effect.
        count: How many clients to draw.
        rng: The generator.
        kind: "uniform" draws without replacement; "proportional" draws with replacement, and a
            client's probability is proportional to its number of examples.
    """
    _checks.integer("count", count, minimum=1)
    _checks.choice("selection", kind, SELECTIONS)
    clients = sorted(available)
    # Only `rng.random` is used, because NumPy may change the draws of `rng.choice`.
    if kind == "uniform":
        if count > len(clients):
            raise ValueError(f"cannot select {count} of {len(clients)} clients")
        drawn = rng.random(len(clients))
        if count == 1:  # FedOne draws one of perhaps thousands of clients per round.
            return [clients[np.argmin(drawn)]]
        # Only the smallest draws are sorted, because few of many clients are chosen.
        least = np.flatnonzero(drawn <= np.partition(drawn, count - 1)[count - 1])
        order = least[np.argsort(drawn[least], kind="stable")]
        return [clients[k] for k in order[:count]]
    examples = [_checks.integer(f"examples of client {k}", available[k]) for k in clients]
    if sum(examples) == 0:
        raise ValueError("cannot select in proportion to examples: no client has examples")
    cumulative = np.cumsum(examples) / sum(examples)
    return [clients[k] for k in np.searchsorted(cumulative, rng.random(count), side="right")]
