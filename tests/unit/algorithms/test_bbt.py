from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import numpy as np
import pytest
from cmaes import CMA
from pydantic import TypeAdapter

from fedone_sdk.algorithms import BBT, Candidates, State, bounded, dump_state, stream
from fedone_sdk.algorithms.cma_es import CmaEs
from fedone_sdk.algorithms.projection import reach
from fedone_sdk.errors import MissingExtraError
from fedone_sdk.messages.array import SharedMemory
from fedone_sdk.messages.ndarray import memory_from_wire, memory_to_wire

SIZE = 20
OPTIMUM = np.random.default_rng(1).uniform(-2.0, 2.0, size=SIZE)
Loss = Callable[[np.ndarray], np.ndarray]


def method(**options: object) -> BBT:
    settings = {"intrinsic_dim": SIZE, "num_samples": 12, "sigma": 1.0, "bound": 5.0}
    return BBT(**(settings | {"memory": "client"} | options))  # type: ignore[arg-type]


def sphere(vectors: np.ndarray) -> np.ndarray:
    return ((vectors - OPTIMUM) ** 2).sum(axis=-1)


def ellipsoid(vectors: np.ndarray) -> np.ndarray:
    """Axes of condition 10^4, turned against the coordinates."""
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(SIZE, SIZE)))
    return np.geomspace(1.0, 1e4, SIZE) @ (((vectors - OPTIMUM) @ turn) ** 2).T


def train(bbt: BBT, state: State, steps: range, loss: Loss = sphere) -> State:
    for step in steps:
        candidates = bbt.ask(state, stream(step))
        state = bbt.tell(state, candidates, loss(bounded(candidates.prompts, bbt.bound)))
    return state


def library_in(state: State, population: int) -> CMA:
    """The library's own optimiser, put where `state` is."""
    memory = CmaEs.remembered(state.memory, size=SIZE, sigma=1.0)
    # Populations below 4 have a rate of 0, by which the library divides to take a minimum.
    with np.errstate(divide="ignore"):
        library = CMA(
            mean=state.alpha[0].astype(np.float64),
            sigma=memory.sigma,
            cov=memory.covariance,
            population_size=population,
        )
    library._p_sigma, library._pc = memory.sigma_path, memory.covariance_path
    library._g = memory.generation
    return library


def assert_same_step(library: CMA, state: State) -> None:
    after = CmaEs.remembered(state.memory, size=SIZE, sigma=1.0)
    np.testing.assert_allclose(state.alpha[0], library._mean, rtol=1e-6, atol=1e-9)
    assert after.sigma == pytest.approx(library._sigma, rel=1e-9)
    np.testing.assert_allclose(after.covariance, library._C, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(after.sigma_path, library._p_sigma, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(after.covariance_path, library._pc, rtol=1e-7, atol=1e-9)
    assert after.generation == library.generation


@pytest.mark.parametrize(("loss", "steps"), [(sphere, 200), (ellipsoid, 500)])
def test_finds_the_optimum(loss: Loss, steps: int) -> None:
    bbt = method()
    state = train(bbt, bbt.init(), range(steps), loss)
    assert loss(bbt.prompt(state)) < 1e-6 * loss(np.zeros(SIZE))


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_finds_an_optimum_on_the_bounds_and_stays_there(sigma: float) -> None:
    """Told what was cut off at the bounds, CMA-ES is back at a distance of 1 after 400 steps."""
    bbt = method(bound=1.1, sigma=sigma)
    state = bbt.init()
    for start, distance in (0, 1e-2), (200, 1e-4), (400, 1e-4):
        state = train(bbt, state, range(start, start + 200))
        assert np.abs(state.alpha).max() <= np.float32(reach(1.1))
        found = bounded(bbt.prompt(state), 1.1)
        np.testing.assert_allclose(found, np.clip(OPTIMUM, -1.1, 1.1), atol=distance)


@pytest.mark.parametrize("population", [2, 3, 4, 5, 12, 200])
def test_tell_is_the_librarys_step(population: int) -> None:
    """For whole populations, and for fewer candidates than the population of the method."""
    bbt = method(num_samples=200, bound=1e4)
    state = bbt.init()
    for step in range(15):
        candidates = bbt.ask(state, stream(step), population)
        losses = ellipsoid(candidates.prompts)
        library = library_in(state, population)
        library.tell(list(zip(candidates.prompts.astype(np.float64), losses, strict=True)))
        state = bbt.tell(state, candidates, losses)
        assert_same_step(library, state)


def test_ask_draws_what_the_library_draws() -> None:
    """From the same numbers: ours go through the symmetric root, the library's do not."""
    bbt = method(sigma=3.0)
    state = train(bbt, bbt.init(), range(20), ellipsoid)
    library = library_in(state, 12)
    axes, _ = library._eigen_decomposition()
    draws = iter(stream(9).standard_normal((12, SIZE)))

    class Draws:
        def randn(self, size: int) -> np.ndarray:
            return axes.T @ next(draws)

    library._rng = Draws()
    expected = [library.ask() for _ in range(12)]
    np.testing.assert_allclose(bbt.ask(state, stream(9)).prompts, expected, rtol=1e-6, atol=1e-6)


def test_ask_does_not_depend_on_the_choice_of_eigenvectors() -> None:
    """The root that turns draws into vectors is the symmetric positive one, which is unique."""
    bbt = method(num_samples=SIZE)
    state = train(bbt, bbt.init(), range(10), ellipsoid)
    memory = CmaEs.remembered(state.memory, size=SIZE, sigma=1.0)
    draws = stream(4).standard_normal((SIZE, SIZE))
    steps = (bbt.ask(state, stream(4)).prompts - state.alpha[0]) / memory.sigma
    root = np.linalg.solve(draws, steps)
    np.testing.assert_allclose(root, root.T, atol=1e-4)
    np.testing.assert_allclose(root @ root, memory.covariance, atol=1e-4)
    assert np.linalg.eigvalsh(root).min() > 0.0


def test_tell_takes_the_float32_numbers_that_travelled() -> None:
    bbt = method()
    state = train(bbt, bbt.init(), range(3))
    candidates = bbt.ask(state, stream(7))
    assert candidates.prompts.dtype == np.float32
    losses = sphere(candidates.prompts)
    arrived = Candidates(prompts=np.frombuffer(candidates.prompts.tobytes(), "<f4").reshape(12, -1))
    assert dump_state(bbt.tell(state, candidates, losses)) == dump_state(
        bbt.tell(state, arrived, losses)
    )


def test_continues_from_the_server_s_mean() -> None:
    bbt = method()
    mine = train(bbt, bbt.init(), range(5))
    averaged = mine.evolve(alpha=mine.alpha + np.float32(1.0))
    draws = [bbt.ask(state, stream(1)).prompts for state in (mine, averaged)]
    np.testing.assert_allclose(draws[1], draws[0] + 1.0, atol=1e-5)
    steps = [
        bbt.tell(state, Candidates(prompts=vectors), np.arange(12.0))
        for state, vectors in zip((mine, averaged), draws, strict=True)
    ]
    np.testing.assert_allclose(steps[1].alpha, steps[0].alpha + 1.0, atol=1e-5)
    for name, array in steps[0].memory.items():
        np.testing.assert_allclose(steps[1].memory[name], array, atol=1e-5)


def test_two_clients_share_a_mean_or_a_search() -> None:
    assert not method().shares_memory
    assert method(memory="run").shares_memory


@pytest.mark.parametrize("ties", [np.zeros(12), np.repeat([1.0, 0.0], 6)])
def test_constant_and_tied_losses_break_nothing(ties: np.ndarray) -> None:
    bbt = method()
    state = bbt.init()
    for step in range(300):
        state = bbt.tell(state, bbt.ask(state, stream(step)), ties)
    assert np.abs(state.alpha).max() <= np.float32(reach(bbt.bound))
    assert 1e-3 < float(state.memory["sigma"]) < 1e3


def test_candidates_that_are_all_the_same_break_nothing() -> None:
    bbt = method()
    state = bbt.init()
    for _ in range(400):
        state = bbt.tell(state, Candidates(prompts=np.ones((4, SIZE))), np.arange(4.0))
    assert np.array_equal(state.alpha, np.ones((1, SIZE)))
    assert float(state.memory["sigma"]) == 1e-12
    assert np.isfinite(bbt.ask(state, stream(0)).prompts).all()


def test_memory_travels_bit_for_bit() -> None:
    bbt = method()
    state = train(bbt, bbt.init(), range(4))
    wire = TypeAdapter(SharedMemory).validate_python(memory_to_wire(state.memory))
    there = State(alpha=state.alpha, memory=memory_from_wire(wire))
    assert dump_state(there) == dump_state(state)
    assert dump_state(train(bbt, there, range(4, 8))) == dump_state(train(bbt, state, range(4, 8)))


def changed(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    bbt = method()
    return dict(train(bbt, bbt.init(), range(2)).memory) | {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sigma", np.array(0.0)),
        ("sigma", np.array(np.inf)),
        ("sigma", np.array(np.nan)),
        ("sigma", np.array([1.0])),
        ("generation", np.array(-1)),
        ("generation", np.array(2**63 - 1)),
        ("generation", np.array(np.inf)),
        ("covariance", np.zeros(SIZE * (SIZE + 1) // 2)),
        ("covariance", np.full(SIZE * (SIZE + 1) // 2, np.nan)),
        ("covariance", np.full(SIZE * (SIZE + 1) // 2, 1e300)),
        ("covariance", np.ones(SIZE)),
        ("covariance_path", np.full(SIZE, -np.inf)),
        ("sigma_path", np.zeros(SIZE - 1)),
        ("more", np.zeros(1)),
    ],
)
def test_a_memory_that_cannot_be_continued_is_refused(name: str, value: np.ndarray) -> None:
    bbt = method()
    state = bbt.init().evolve(memory=changed(name, value))
    with pytest.raises(ValueError, match="memory"):
        bbt.ask(state, stream(0))


def test_a_covariance_without_an_inverse_never_gives_nan() -> None:
    """An attacker's matrix: all ones, of rank 1. It is refused, or the run continues from it."""
    bbt = method()
    liar = changed("covariance", np.ones(SIZE * (SIZE + 1) // 2))
    state = bbt.init().evolve(memory=liar)
    candidates = bbt.ask(state, stream(0))
    assert np.isfinite(candidates.prompts).all()
    with contextlib.suppress(ValueError):
        after = bbt.tell(state, candidates, sphere(candidates.prompts))
        assert all(np.isfinite(array).all() for array in after.memory.values())


def test_without_the_library_no_query_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a run of clients needs no more than `init`, `project` and `prompt`."""
    monkeypatch.setitem(sys.modules, "cmaes", None)
    bbt = method()
    assert bbt.project(bbt.init().alpha).shape == (1, SIZE)
    with pytest.raises(MissingExtraError, match=r"BBT needs an extra: .*\[bbt\]"):
        bbt.ask(bbt.init(), stream(0))
