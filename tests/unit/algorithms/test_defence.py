"""The defences against malicious clients, alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedone_sdk.algorithms import dump_memory, load_memory
from fedone_sdk.algorithms.defence import (
    WARM_UP,
    WINDOW,
    Admitted,
    Contribution,
    Defence,
    Influence,
    ledger,
)
from fedone_sdk.algorithms.method_state import Memory

SHAPE = (3, 8)
ALPHA = np.full(SHAPE, 1 / 8, dtype=np.float32)
TRUTH = np.random.default_rng(0).normal(size=SHAPE)
STANDARD = Defence(num_samples=20, trust_region=1.5, outliers=3.0, quarantine=2)


def step(
    rng: np.random.Generator, *, length: float = 0.01, truth: float = 1.0
) -> NDArray[np.float64]:
    """A noisy step down the slope of `TRUTH`."""
    drawn = truth * TRUTH + 0.5 * rng.normal(size=SHAPE)
    return -length * drawn / np.linalg.norm(drawn)


def brought_by(client: int, moved: NDArray[np.float64], **changes: object) -> Contribution:
    alpha = (ALPHA + moved).astype(np.float32)
    return Contribution(client=client, alpha=alpha, mean_loss=0.7, **changes)  # type: ignore[arg-type]


def honest(defence: Defence, rounds: int, memory: Memory | None = None, first: int = 0) -> Memory:
    """What is known after so many rounds of one honest client each."""
    rng = np.random.default_rng(first + 1)
    memory = {} if memory is None else memory
    for number in range(first, first + rounds):
        _, memory = defence.admit(ALPHA, [brought_by(number, step(rng))], memory)
    return memory


def one(defence: Defence, contribution: Contribution, memory: Memory) -> Admitted:
    (admitted,), _ = defence.admit(ALPHA, [contribution], memory)
    return admitted


def entry(memory: Memory, client: int) -> Influence:
    return next(line for line in ledger(memory) if line.client == client)


def test_without_options_everything_passes_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    memory: Memory = {}
    for number in range(12):
        wild = brought_by(number % 3, 10.0 ** rng.integers(-6, 6) * step(rng))
        (admitted,), memory = Defence(num_samples=20).admit(ALPHA, [wild], memory)
        assert admitted.alpha.tobytes() == wild.alpha.tobytes()
        assert (admitted.scale, admitted.outlier) == (1.0, False)
    assert Defence(num_samples=20).quarantined(memory) == frozenset()


def test_honest_steps_pass_bit_for_bit() -> None:
    memory = honest(STANDARD, 30)
    assert not any(line.outliers for line in ledger(memory))
    after_the_first = [line for line in ledger(memory) if line.client]
    assert not any(line.scaled for line in after_the_first)
    fair = brought_by(99, step(np.random.default_rng(77)))
    assert one(STANDARD, fair, memory).alpha.tobytes() == fair.alpha.tobytes()


# The trust region


def test_a_long_step_ends_on_the_ball() -> None:
    defence = Defence(num_samples=20, trust_region=1.5)
    memory = honest(defence, 20)
    long = brought_by(99, 100 * step(np.random.default_rng(5)))
    admitted = one(defence, long, memory)
    moved = admitted.alpha.astype(np.float64) - ALPHA
    assert np.linalg.norm(moved) == pytest.approx(1.5 * 0.01, rel=1e-3)
    whole = long.alpha.astype(np.float64) - ALPHA
    assert np.vdot(moved, whole) == pytest.approx(
        np.linalg.norm(moved) * np.linalg.norm(whole), rel=1e-4
    )
    assert admitted.scale == pytest.approx(0.015 / np.linalg.norm(whole), rel=1e-3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_attacker_among_the_first_does_not_set_the_scale(place: int) -> None:
    memory: Memory = {}
    rng = np.random.default_rng(0)
    total = np.linalg.norm(ALPHA)
    for number in range(8):
        huge = number == place
        contribution = brought_by(number, step(rng, length=10.0 if huge else 0.004))
        (admitted,), memory = STANDARD.admit(ALPHA, [contribution], memory)
        moved = np.linalg.norm(admitted.alpha.astype(np.float64) - ALPHA)
        if huge:
            assert moved <= 0.02 * total * (1 + 1e-6)
        elif number > 2:
            assert admitted.scale == 1.0


@pytest.mark.parametrize("spread", [None, 0.0])
def test_updates_that_say_nothing_are_not_what_is_usual(spread: float | None) -> None:
    """Most prompts of a run that has nearly converged are the same."""
    memory = honest(STANDARD, 10)
    nothing = brought_by(50, np.zeros(SHAPE), spread=spread)
    for _ in range(WINDOW):
        (admitted,), memory = STANDARD.admit(ALPHA, [nothing], memory)
        assert not admitted.outlier
    after = one(STANDARD, brought_by(99, step(np.random.default_rng(77))), memory)
    assert (after.scale, after.outlier) == (1.0, False)


def test_tiny_steps_cannot_stop_the_run() -> None:
    """Silent attackers among the first shrink steps while they are the majority."""
    memory: Memory = {}
    rng = np.random.default_rng(0)
    for number in range(10):
        silent = number < 2
        _, memory = STANDARD.admit(
            ALPHA, [brought_by(number, step(rng, length=1e-9 if silent else 0.01))], memory
        )
    assert one(STANDARD, brought_by(50, step(rng)), memory).scale == 1.0


def test_many_clients_measure_each_other() -> None:
    rng = np.random.default_rng(0)
    brought = [
        brought_by(client, step(rng, length=5.0 if client == 3 else 0.01)) for client in range(5)
    ]
    admitted, _ = Defence(num_samples=20, trust_region=1.5).admit(ALPHA, brought, {})
    assert [one.scale == 1.0 for one in admitted] == [True, True, True, False, True]
    assert np.linalg.norm(admitted[3].alpha.astype(float) - ALPHA) == pytest.approx(0.015, rel=1e-3)


# Outliers


def test_nothing_is_an_outlier_before_something_is_known() -> None:
    rng = np.random.default_rng(3)
    assert not one(STANDARD, brought_by(0, -step(rng)), {}).outlier
    memory = honest(STANDARD, WARM_UP - 1)
    assert not one(STANDARD, brought_by(99, -step(rng)), memory).outlier


def test_an_ascent_is_held_back() -> None:
    memory = honest(STANDARD, 20)
    lie = brought_by(99, -step(np.random.default_rng(5)))
    admitted = one(STANDARD, lie, memory)
    assert admitted.outlier
    assert admitted.scale == 0.0
    assert admitted.agreement is not None
    assert admitted.agreement < -0.3
    assert admitted.alpha.tobytes() == ALPHA.tobytes()


def test_evidence_is_looked_at_before_the_step() -> None:
    """In the losses exchange the server sees the losses, whatever an optimiser does."""
    memory = honest(STANDARD, 20)
    rng = np.random.default_rng(5)
    assert one(STANDARD, brought_by(9, step(rng), advantage=-TRUTH, spread=0.01), memory).outlier
    assert not one(
        STANDARD, brought_by(9, -step(rng), advantage=TRUTH, spread=0.01), memory
    ).outlier


def test_losses_that_spread_far_too_much_are_held_back() -> None:
    memory: Memory = {}
    rng = np.random.default_rng(0)
    for number in range(20):
        fair = brought_by(
            number, step(rng), advantage=TRUTH, spread=0.2 * float(np.exp(rng.normal() / 5))
        )
        _, memory = STANDARD.admit(ALPHA, [fair], memory)
    wild, calm = (brought_by(99, step(rng), advantage=TRUTH, spread=s) for s in (50.0, 1e-9))
    assert one(STANDARD, wild, memory).outlier
    assert not one(STANDARD, calm, memory).outlier  # it moves nothing


def test_chance_makes_no_outlier() -> None:
    """With few prompts a correlation is uncertain, and honest clients that agree less stay in."""
    few, many = (Defence(num_samples=count, outliers=3.0) for count in (4, 10_000))
    memory = honest(few, 30)
    weak = brought_by(99, step(np.random.default_rng(5), truth=0.25))
    agreement = one(few, weak, memory).agreement
    assert agreement is not None
    assert 0.0 < agreement < 0.6
    assert not one(few, weak, memory).outlier
    assert one(many, weak, memory).outlier


def test_one_loud_client_has_one_vote() -> None:
    defence = Defence(num_samples=20)
    quiet, loud = (
        defence.admit(ALPHA, [brought_by(0, factor * step(np.random.default_rng(0)))], {})[1]
        for factor in (1.0, 100.0)
    )
    np.testing.assert_allclose(loud["votes"], quiet["votes"], atol=1e-2)
    assert abs(quiet["votes"]).max() <= 3.0


# Quarantine and the ledger


def test_a_client_is_quarantined_for_most_of_its_updates_not_for_some() -> None:
    memory = honest(STANDARD, 20)
    rng = np.random.default_rng(5)
    for sign in (1, 1, -1, -1):  # half of them
        _, memory = STANDARD.admit(ALPHA, [brought_by(99, sign * step(rng))], memory)
    assert entry(memory, 99).outliers == 2
    assert STANDARD.quarantined(memory) == frozenset()
    _, memory = STANDARD.admit(ALPHA, [brought_by(99, -step(rng))], memory)
    assert STANDARD.quarantined(memory) == {99}


def test_the_ledger_counts_what_counted() -> None:
    memory = honest(STANDARD, 20)
    rng = np.random.default_rng(5)
    for moved in (step(rng), 100 * step(rng), -step(rng)):
        contribution = brought_by(7, moved, spread=0.01)
        contribution = Contribution(client=70, alpha=contribution.alpha, mean_loss=0.9, spread=0.01)
        _, memory = STANDARD.admit(ALPHA, [contribution], memory)
    found = entry(memory, 70)
    assert (found.rounds, found.scaled, found.outliers) == (3, 1, 1)
    assert found.movement == pytest.approx(0.01 + 0.015, rel=0.05)
    assert found.loss_residual == pytest.approx(0.2, abs=1e-6)
    assert found.score < 0


def test_what_is_remembered_is_bounded_and_saved_exactly() -> None:
    memory = honest(STANDARD, WINDOW + 30)
    assert all(len(memory[name]) == WINDOW for name in ("steps", "sizes", "losses"))
    again = load_memory(dump_memory(memory))
    lie = brought_by(99, -step(np.random.default_rng(1)))
    ours, theirs = (STANDARD.admit(ALPHA, [lie], known) for known in (memory, again))
    assert dump_memory(ours[1]) == dump_memory(theirs[1])
    assert ledger(ours[1]) == ledger(theirs[1])


def test_inputs_are_left_alone() -> None:
    memory = honest(STANDARD, 10)
    before = dump_memory(memory)
    STANDARD.admit(ALPHA, [brought_by(1, step(np.random.default_rng(1)))], memory)
    assert dump_memory(memory) == before
    assert ledger({}) == []


@pytest.mark.parametrize(
    "wrong",
    [{"num_samples": 1}, {"trust_region": 0}, {"outliers": float("nan")}, {"quarantine": 0}],
)  # fmt: skip
def test_impossible_options(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Defence(**{"num_samples": 20, **wrong})  # type: ignore[arg-type]
