"""The contract of every method of the registry."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import TypeAdapter

from fedone_sdk.algorithms import (
    Algorithm,
    Candidates,
    Space,
    State,
    dump_memory,
    dump_state,
    load_memory,
    load_state,
    make_method,
    method_from_spec,
    stream,
    stream_seed,
)
from fedone_sdk.algorithms.registry import METHODS, method_options
from fedone_sdk.algorithms.search_methods import TPE, RandomSearch, ThompsonSampling
from fedone_sdk.spec import MethodSpec

N_POSITIONS, N_TOKENS, N_SAMPLES = 5, 10, 8
SPACE, BLANK = (Space.repeated(N_POSITIONS, N_TOKENS, blank) for blank in (None, 3))
VARIANTS = {
    "gs-bdpl/adamw": ("gs-bdpl", {"tau": 0.5, "learning_rate": 0.01}),
    "gs-bdpl/sgd": ("gs-bdpl", {"tau": 0.5, "learning_rate": 1e-3, "optimizer": "sgd",
                                "alpha_min": 1e-2}),
    "bdpl/adamw": ("bdpl", {"learning_rate": 0.01}),
    "bdpl/sgd": ("bdpl", {"learning_rate": 1e-3, "optimizer": "sgd", "alpha_min": 1e-2}),
    "random": ("random", {}),
    "random/blank": ("random", {"space": BLANK}),
    "thompson": ("thompson", {}),
    "thompson/blank": ("thompson", {"space": BLANK}),
    "tpe": ("tpe", {}),
    "tpe/halving": ("tpe", {"halving": 4, "search": 16, "space": BLANK}),
}  # fmt: skip
COSTS = np.random.default_rng(7).normal(size=(N_POSITIONS, N_TOKENS))
# A random prompt has mean 0 and standard deviation 2.2 here; the best costs about -7.
BEST_TOKENS = COSTS.min(axis=1).sum()


@pytest.fixture(params=VARIANTS)
def method(request: pytest.FixtureRequest) -> Algorithm:
    name, options = VARIANTS[request.param]
    return make_method(name, **({"space": SPACE} | options), num_samples=N_SAMPLES, seed=1)


def cost(prompts: np.ndarray) -> np.ndarray:
    """Separable."""
    return COSTS[np.arange(N_POSITIONS), prompts].sum(axis=-1)


def train(method: Algorithm, state: State, steps: range) -> State:
    for step in steps:
        candidates = method.ask(state, stream(stream_seed(5, "prompts", step)))
        state = method.tell(state, candidates, cost(candidates.prompts))
    return state


def asked(method: Algorithm) -> tuple[State, Candidates, np.ndarray]:
    state = train(method, method.init(), range(3))
    candidates = method.ask(state, stream(1))
    return state, candidates, cost(candidates.prompts)


def test_every_method_is_under_contract() -> None:
    assert {name for name, _ in VARIANTS.values()} == set(METHODS)


def test_starts_uniform(method: Algorithm) -> None:
    state = method.init()
    assert state.alpha.shape == method.shape
    assert state.alpha.dtype == np.float32
    assert np.ptp(state.alpha) == 0.0


def test_ask_draws_prompts_and_returns_their_source(method: Algorithm) -> None:
    for state in (method.init(), train(method, method.init(), range(4))):
        candidates = method.ask(state, stream(0))
        assert candidates.prompts.shape == (N_SAMPLES, N_POSITIONS)
        assert candidates.prompts.dtype == np.int64
        assert candidates.probabilities.shape == (N_POSITIONS, N_TOKENS)
        np.testing.assert_allclose(candidates.probabilities.sum(axis=1), 1.0, atol=1e-12)
        assert method.ask(state, stream(0), num_samples=3).prompts.shape == (3, N_POSITIONS)
        assert len(method.ask(state, stream(0), num_samples=1).prompts) == 1


def test_same_stream_same_candidates(method: Algorithm) -> None:
    state = train(method, method.init(), range(4))
    one, same, other = (method.ask(state, stream(seed)) for seed in (1, 1, 2))
    for mine, yours in zip(arrays_of(one), arrays_of(same), strict=True):
        assert mine.tobytes() == yours.tobytes()
    assert one.prompts.tobytes() != other.prompts.tobytes()


def test_tell_is_deterministic_and_leaves_its_inputs_alone(method: Algorithm) -> None:
    state, candidates, losses = asked(method)
    before = dump_state(state), candidates.prompts.tobytes(), losses.tobytes()
    results = {dump_state(method.tell(state, candidates, losses)) for _ in range(3)}
    assert len(results) == 1
    assert before == (dump_state(state), candidates.prompts.tobytes(), losses.tobytes())


def test_arrays_are_read_only(method: Algorithm) -> None:
    state, candidates, _ = asked(method)
    for array in (state.alpha, *state.memory.values(), *arrays_of(candidates)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def arrays_of(candidates: Candidates) -> list[np.ndarray]:
    return [candidates.prompts, candidates.probabilities]


def test_saved_state_continues_bit_for_bit(method: Algorithm) -> None:
    halfway = train(method, method.init(), range(6))
    whole = dump_state(train(method, halfway, range(6, 12)))
    assert dump_state(load_state(dump_state(halfway))) == dump_state(halfway)
    assert dump_state(train(method, load_state(dump_state(halfway)), range(6, 12))) == whole
    apart = State(alpha=halfway.alpha, memory=load_memory(dump_memory(halfway.memory)))
    assert dump_state(train(method, apart, range(6, 12))) == whole


def test_alpha_stays_feasible_and_a_feasible_one_is_kept_bit_for_bit(method: Algorithm) -> None:
    state = method.init()
    for step in range(10):
        state = train(method, state, range(step, step + 1))
        assert state.alpha.min() > 0.0
        assert method.project(state.alpha).tobytes() == state.alpha.tobytes()


def test_project_makes_anything_feasible_once_and_for_all(method: Algorithm) -> None:
    wild = 10.0 * np.random.default_rng(0).normal(size=method.shape).astype(np.float32)
    projected = method.project(wild)
    assert projected.dtype == np.float32
    assert projected.min() > 0.0
    assert method.project(projected).tobytes() == projected.tobytes()


def test_prompt_is_a_prompt(method: Algorithm) -> None:
    for state in (method.init(), train(method, method.init(), range(5))):
        prompt = method.prompt(state)
        assert prompt.shape == (N_POSITIONS,)
        assert prompt.dtype == np.int64
        assert 0 <= prompt.min() <= prompt.max() < N_TOKENS
        assert prompt.tobytes() == method.prompt(load_state(dump_state(state))).tobytes()


@pytest.mark.parametrize("name", METHODS)
def test_untrained_prompt_is_one_seeded_random_prompt(name: str) -> None:
    def prompt(seed: int) -> bytes:
        method = make_method(name, space=Space.repeated(20, 50), num_samples=4, seed=seed)
        prompt = method.prompt(method.init())
        assert len(set(prompt.tolist())) > 10
        return prompt.tobytes()

    assert prompt(1) == prompt(1) != prompt(2)


def test_learns_a_separable_loss(method: Algorithm) -> None:
    # Searches need fewer asks, and Optuna takes tenths of a second for one.
    steps = 20 if isinstance(method, TPE) else 60 if method.shares_memory else 300
    state = train(method, method.init(), range(steps))
    start = cost(method.prompt(method.init()))
    assert cost(method.prompt(state)) < start
    if not isinstance(method, RandomSearch | ThompsonSampling | TPE):
        # They learn nothing of tokens; or that a token is worth the same everywhere; or too slowly.
        assert cost(method.prompt(state)) < 0.5 * BEST_TOKENS


def test_a_constant_on_all_losses_changes_nothing(method: Algorithm) -> None:
    state, candidates, _ = asked(method)
    losses = np.arange(N_SAMPLES) / 4.0  # exact in binary, and so is the shift
    plain, shifted = (method.tell(state, candidates, losses + c) for c in (0.0, 64.0))
    np.testing.assert_allclose(plain.alpha, shifted.alpha, rtol=1e-6)


@pytest.mark.parametrize(
    ("losses", "message"),
    [([0.0] * (N_SAMPLES - 1), "shape"), ([[0.0]] * N_SAMPLES, "shape"),
     ([0.0] * (N_SAMPLES - 1) + [np.nan], "finite"), ([0.0] * (N_SAMPLES - 1) + [np.inf], "finite"),
     (["x"] * N_SAMPLES, "numbers"), ([{}] * N_SAMPLES, "numbers")],
)  # fmt: skip
def test_bad_losses(method: Algorithm, losses: object, message: str) -> None:
    state, candidates, _ = asked(method)
    with pytest.raises(ValueError, match=message):
        method.tell(state, candidates, losses)  # type: ignore[arg-type]


def test_misfits(method: Algorithm) -> None:
    state, candidates, losses = asked(method)
    with pytest.raises(ValueError, match="at least 2"):
        method.tell(state, method.ask(state, stream(0), num_samples=1), [1.0])
    with pytest.raises(ValueError, match="num_samples"):
        method.ask(state, stream(0), num_samples=0)
    smaller = State(alpha=state.alpha[:, 1:])
    with pytest.raises(ValueError, match="shape"):
        method.ask(smaller, stream(0))
    with pytest.raises(ValueError, match=r"shape|fit"):
        method.project(smaller.alpha)
    other = Candidates(
        prompts=candidates.prompts[:, 1:], probabilities=candidates.probabilities[1:]
    )
    with pytest.raises(ValueError, match="shape"):
        method.tell(state, other, losses)
    with pytest.raises(ValueError, match="call project first"):
        method.ask(state.evolve(alpha=0.0 * state.alpha), stream(0))
    with pytest.raises(ValueError, match="numbers"):
        method.project("alpha")
    with pytest.raises(ValueError, match="finite"):
        method.project(np.full(method.shape, np.nan))


@pytest.mark.parametrize(
    "method", [variant for variant in VARIANTS if "sgd" not in variant], indirect=True
)
def test_someone_elses_memory_is_refused(method: Algorithm) -> None:
    state, candidates, losses = asked(method)
    foreign = state.evolve(memory={"else": np.zeros(3)})
    with pytest.raises(ValueError, match="memory"):
        method.tell(foreign, candidates, losses)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "wrong",
    [{"num_samples": 1}, {"num_samples": True}, {"seed": -1}, {"seed": "x"}],
)  # fmt: skip
def test_bad_sizes(name: str, wrong: dict[str, object]) -> None:
    sizes = {"space": SPACE, "num_samples": 3, "seed": 0} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_method(name, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options"),
    [("gs-bdpl", {"tau": 0}), ("gs-bdpl", {"tau": "hot"}), ("gs-bdpl", {"learning_rate": -1.0}),
     ("gs-bdpl", {"learning_rate": np.inf}), ("gs-bdpl", {"optimizer": "lion"}),
     ("gs-bdpl", {"alpha_min": 0.0}), ("gs-bdpl", {"alpha_min": 0.5}),
     ("gs-bdpl", {"alpha_min": 1e-60}), ("gs-bdpl", {"alpha_init": -1}),
     ("gs-bdpl", {"weight_decay": -0.1}), ("gs-bdpl", {"weight_decay": 0.1, "optimizer": "sgd"}),
     ("bdpl", {"alpha_min": 0.2}), ("bdpl", {"optimizer": None}), ("random", {"search": -1}),
     ("random", {"halving": 0.2}), ("random", {"biases": ((0.0,), (1.0,))})],
)  # fmt: skip
def test_bad_options(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_method(name, space=SPACE, num_samples=3, seed=0, **options)


def test_unknown_names_say_what_is_allowed() -> None:
    sizes = {"space": SPACE, "num_samples": 3, "seed": 0}
    with pytest.raises(ValueError, match=r"bdpl, gs-bdpl, random, thompson, tpe, not 'cma'"):
        make_method("cma", **sizes)
    with pytest.raises(ValueError, match=r"gs-bdpl takes learning_rate, .*, not temperature"):
        make_method("gs-bdpl", temperature=1.0, **sizes)
    options = ("search", "halving", "num_labels", "num_groups", "start")
    assert method_options("random") == options


def test_its_state_can_be_resumed(method: Algorithm) -> None:
    state = method.init()
    method.check(state)
    for step in range(2):
        state = train(method, state, range(step, step + 1))
        method.check(state)
        method.check(State(alpha=state.alpha, memory=load_memory(dump_memory(state.memory))))


def test_other_states_are_refused(method: Algorithm) -> None:
    state = train(method, method.init(), range(1))
    rows, columns = method.shape
    others = [
        State(alpha=np.ones((rows, columns + 1), dtype=np.float32)),
        State(alpha=state.alpha, memory={"x": np.zeros(3)}),
    ]
    if state.memory:
        first, *_ = state.memory
        parts = {name: values for name, values in state.memory.items() if name != first}
        others.append(State(alpha=state.alpha, memory=parts))
        wider = {
            name: np.concatenate([values, values], axis=-1) if values.ndim else values
            for name, values in state.memory.items()
        }
        others.append(State(alpha=state.alpha, memory=wider))
    for other in others:
        with pytest.raises(ValueError, match=r"shape|memory|pool|fit"):
            method.check(other)


@pytest.mark.parametrize("name", METHODS)
def test_a_default_is_the_same_in_the_class_and_in_run_yaml(name: str) -> None:
    spec = TypeAdapter(MethodSpec).validate_python({"name": name})
    described = method_from_spec(spec, SPACE)
    made = make_method(name, space=SPACE, num_samples=spec.num_samples, seed=0)
    for option in method_options(name):
        assert getattr(made, option) == getattr(described, option), option
