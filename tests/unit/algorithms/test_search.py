from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import Candidates, ClassLosses, State, prompt_search, stream
from fedone_sdk.algorithms.prompt_search import FINALISTS, PromptSearch
from fedone_sdk.algorithms.search_methods import TPE, RandomSearch, ThompsonSampling
from fedone_sdk.algorithms.space import Space

SIZES = {"space": Space.repeated(4, 30, blank=0), "num_samples": 10}
WORTH = np.random.default_rng(1).normal(0.0, 0.3, 30) * (np.arange(30) > 0)
KINDS = [RandomSearch, ThompsonSampling]


def cost(prompts: np.ndarray) -> np.ndarray:
    """A token adds the same wherever it stands, once; the blank nothing."""
    there = (prompts[:, :, None] == np.arange(30)).any(axis=1)
    return there @ WORTH


def play(
    method: PromptSearch, queries: int, *, noise: float = 0.1, seed: int = 0
) -> tuple[State, list[int]]:
    """Rounds with clients of very different difficulty; also the prompts of each round."""
    rng = np.random.default_rng(seed)
    state, asked = method.init(), []
    while sum(asked) < queries and not method.finished(state):
        candidates = method.ask(state, stream(seed + len(asked)), method.wanted(state))
        losses = cost(candidates.prompts) + 5.0 * rng.normal()
        losses += noise * rng.normal(size=len(losses))
        state = method.tell(state, candidates, losses)
        asked.append(len(losses))
    return state, asked


def found(method: PromptSearch, state: State) -> float:
    return float(cost(method.prompt(state)[None])[0])


@pytest.mark.parametrize("kind", [RandomSearch, ThompsonSampling])
def test_no_prompt_or_the_incumbent_is_measured_on_every_client(kind: type[PromptSearch]) -> None:
    method = kind(**SIZES)
    state = method.init()
    for step in range(6):
        candidates = method.ask(state, stream(step))
        before = method.prompt(state) if step and kind is ThompsonSampling else np.zeros(4)
        assert candidates.prompts[0].tolist() == before.tolist()
        state = method.tell(state, candidates, cost(candidates.prompts))
    if kind is RandomSearch:
        row = np.flatnonzero((state.memory["prompts"] == 0).all(axis=1))[0]
        assert (state.memory["rows"] == row).sum() >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_is_sent_twice_to_one_client(kind: type[PromptSearch]) -> None:
    """Single tokens are every second new prompt, and there are nine of them."""
    method = kind(space=Space.repeated(4, 10, blank=0), num_samples=10)
    state = method.init()
    for step in range(10):
        candidates = method.ask(state, stream(step))
        assert len(np.unique(candidates.prompts, axis=0)) == len(candidates.prompts) == 10
        state = method.tell(state, candidates, cost(candidates.prompts))


def test_more_prompts_than_there_are_can_be_asked() -> None:
    method = ThompsonSampling(space=Space.repeated(1, 3, blank=0), num_samples=10)
    state = method.init()
    for step in range(3):
        candidates = method.ask(state, stream(step))
        assert len(candidates.prompts) == 10
        state = method.tell(state, candidates, cost(candidates.prompts))
    assert set(state.memory["prompts"].ravel().tolist()) == {0, 1, 2}


def test_beats_random_search_where_tokens_are_worth_something() -> None:
    def mean(one: type[PromptSearch]) -> float:
        method = one(**SIZES)
        return float(np.mean([found(method, play(method, 300, seed=s)[0]) for s in range(3)]))

    assert mean(ThompsonSampling) < mean(RandomSearch) < 0.0


def test_thompson_sampling_needs_few_queries() -> None:
    best = np.sort(WORTH)[:4].sum()
    method = ThompsonSampling(**SIZES)
    results = [found(method, play(method, 150, seed=seed)[0]) for seed in range(6)]
    assert np.mean(results) < 0.8 * best


@pytest.mark.parametrize("kind", KINDS)
def test_new_prompts_differ_from_no_prompt_in_few_slots(kind: type[PromptSearch]) -> None:
    """One of five slots in half of the prompts; a repeated slot without a blank is not limited."""
    space = Space.of([(1, 9, 0), (1, 9, None), (1, 9, 4), (1, 9, 0), (1, 9, 8), (3, 9, None)])
    method = kind(space=space, num_samples=10)
    asked = method.ask(method.init(), stream(0), 1000).prompts
    changes = (asked[1:, :5] != np.array([0, 0, 4, 0, 8])).sum(axis=1)
    assert (changes <= 1).mean() == pytest.approx(0.55, abs=0.1)
    assert 0 < (changes > 3).mean() < 0.15
    assert (asked[1:, 5:] > 0).mean() > 0.8
    state = method.tell(method.init(), method.ask(method.init(), stream(0)), np.arange(10.0))
    new = method.ask(state, stream(1), 1000).prompts
    assert (new[:, :5] != np.array([0, 0, 4, 0, 8])).sum(axis=1).mean() < 3.0


def test_without_a_blank_every_position_has_a_token() -> None:
    method = ThompsonSampling(space=Space.repeated(4, 30), num_samples=10)
    state, _ = play(method, 60)
    candidates = method.ask(state, stream(99))
    known = {prompt.tobytes() for prompt in state.memory["prompts"]}
    new = [prompt for prompt in candidates.prompts if prompt.tobytes() not in known]
    assert len(new) > 3
    assert np.mean([len(set(prompt.tolist())) == 4 for prompt in new]) > 0.5
    tiny = ThompsonSampling(space=Space.repeated(4, 2), num_samples=4)
    prompts = tiny.ask(tiny.init(), stream(0))
    state = tiny.tell(tiny.init(), prompts, prompts.prompts.sum(axis=1))
    assert tiny.ask(state, stream(1)).prompts.shape == (4, 4)


def test_a_race_of_one_known_prompt_asks_for_it_twice() -> None:
    method = RandomSearch(space=Space.repeated(1, 2), num_samples=2, search=1, halving=1)
    asked = Candidates(prompts=np.zeros((2, 1), int), probabilities=np.full((1, 2), 0.5))
    state = method.tell(method.init(), asked, [0.1, 0.2])
    assert method.ask(state, stream(1), 2).prompts.tolist() == [[0], [0]]


def test_a_race_asks_for_fewer_prompts_and_ends() -> None:
    method = RandomSearch(**SIZES, search=10, halving=9)
    state, asked = play(method, 10_000)
    assert asked == [10] * 10 + [FINALISTS] * 3 + [FINALISTS // 2] * 3 + [FINALISTS // 4] * 3
    assert method.finished(state)
    assert not method.finished(play(RandomSearch(**SIZES), 200)[0])


def test_racers_are_the_best_and_no_prompt() -> None:
    method = RandomSearch(**SIZES, search=10, halving=6)
    state, _ = play(method, 100)
    finalists = method.ask(state, stream(7), method.wanted(state)).prompts
    assert finalists.tolist()[:7] == state.memory["prompts"][:7].tolist()
    assert (finalists == 0).all(axis=1).any()


def test_a_race_helps_to_choose_under_noise() -> None:
    def mean(queries: int, **options: int) -> float:
        method = RandomSearch(**SIZES, **options)
        ends = [play(method, queries, noise=1.5, seed=seed)[0] for seed in range(8)]
        return float(np.mean([found(method, end) for end in ends]))

    without = mean(80)
    assert mean(80, search=8, halving=15) == without  # the queries are over when the halving begins
    assert mean(10_000, search=8, halving=15) < without - 0.2


@pytest.mark.parametrize("easier", [0.0, 5.0])
def test_how_hard_clients_are_does_not_move_the_leader(easier: float) -> None:
    """Neither an easy first client, nor clients that become easier, are a better leader."""
    method = ThompsonSampling(**SIZES, search=40, halving=1)
    state, began, leaders = method.init(), 0, []
    rng = np.random.default_rng(0)
    while not method.finished(state):
        candidates = method.ask(state, stream(began), method.wanted(state))
        losses = cost(candidates.prompts) + 0.05 * rng.normal(size=len(candidates.prompts))
        losses -= easier * (began == 0) + 0.05 * easier * began
        state = method.tell(state, candidates, losses)
        leaders.append(method.prompt(state).tolist())
        began += 1
    assert leaders[-1] != leaders[0]
    assert cost(np.array(leaders[-15:])).max() < 0.8 * np.sort(WORTH)[:4].sum()


def test_a_calibrated_leader_has_its_own_bias() -> None:
    """Token 1 separates the classes, and shifts the log-odds by 2; the others do nothing."""
    method = ThompsonSampling(**SIZES, num_labels=2, num_groups=2)
    state = method.init()
    assert method.bias(state) is None
    rng, labels = np.random.default_rng(0), np.repeat([0, 1], 16)
    apart = np.where(labels == 1, 1.0, -1.0)
    for step in range(20):
        candidates = method.ask(state, stream(step))
        assert candidates.biases is not None
        helped = (candidates.prompts == 1).any(axis=1)
        odds = rng.normal(apart, 1.0)[None] + (apart + 2.0) * helped[:, None]
        odds = odds + candidates.biases[:, 1:]
        losses = np.logaddexp(0.0, np.where(labels == 1, -1.0, 1.0) * odds)
        one = 1.0 / (1.0 + np.exp(-odds))
        terms = np.stack([losses, 2.0 * one * (1.0 - one), 1.0 - one, one], axis=-1)
        means = np.stack([terms[:, labels == c].mean(axis=1) for c in range(2)], axis=1)
        updated = ClassLosses(
            means=means, counts=np.array([16, 16]), targets=np.eye(2), biases=candidates.biases
        )
        state = method.tell(state, candidates, updated)
    assert 1 in method.prompt(state)
    bias = method.bias(state)
    assert bias is not None
    assert bias[0] == 0.0
    assert bias[1] == pytest.approx(-2.0, abs=0.5)


def test_blanks_are_at_the_end_so_that_equal_texts_are_one_prompt() -> None:
    for kind in KINDS:
        method = kind(**SIZES)
        state, _ = play(method, 100)
        for prompt in method.ask(state, stream(5)).prompts.tolist():
            tokens = [token for token in prompt if token]
            assert prompt == tokens + [0] * (4 - len(tokens))


def test_a_pool_beyond_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = RandomSearch(**SIZES)
    state, _ = play(method, 100)
    method.check(state)
    monkeypatch.setattr(prompt_search, "POOL_SIZE", len(state.memory["prompts"]) - 1)
    with pytest.raises(ValueError, match=r"prompts and \d+ losses at most"):
        method.check(state)


def test_a_full_pool_keeps_the_best_prompts_and_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_search, "POOL_SIZE", 6)
    method = RandomSearch(**SIZES)
    state = method.init()
    for step in range(6):
        candidates = method.ask(state, stream(step))
        state = method.tell(state, candidates, cost(candidates.prompts))
        pool = state.memory["prompts"]
        assert len(pool) == 6
        assert (pool == 0).all(axis=1).any()
        assert method.prompt(state).tolist() == pool[0].tolist()
        method.check(state)


def class_losses(means: np.ndarray, counts: list[float], **more: np.ndarray) -> ClassLosses:
    size, groups, width = (*means.shape, 3)[:3]
    shares, biases = np.zeros((groups, width - 2)), np.zeros((size, width - 2))
    given = {"targets": shares, "biases": biases, **more}
    return ClassLosses(means=means, counts=np.array(counts), **given)


def test_losses_that_do_not_fit_are_refused() -> None:
    method = RandomSearch(**SIZES, num_labels=2, num_groups=2)
    candidates = method.ask(method.init(), stream(0))
    for shape in ((9, 2, 4), (10, 2, 3), (10, 3, 4), (10, 1, 4)):
        losses = class_losses(np.zeros(shape), [1] * shape[1])
        with pytest.raises(ValueError, match="shape"):
            method.tell(method.init(), candidates, losses)
    with pytest.raises(ValueError, match="shape"):
        method.tell(method.init(), candidates, np.zeros(10))
    with pytest.raises(ValueError, match="num_groups must be 1 or num_labels = 3"):
        RandomSearch(**SIZES, num_labels=3, num_groups=2)


@pytest.mark.parametrize(
    ("means", "counts", "more", "message"),
    [(np.zeros((2, 2)), [1, 1], {}, "means"), (np.full((2, 2, 4), np.nan), [1, 1], {}, "means"),
     (np.zeros((2, 2, 4)), [1], {}, "counts"), (np.zeros((2, 2, 4)), [0, 0], {}, "counts"),
     (np.zeros((2, 2, 4)), [-1, 2], {}, "counts"), (np.zeros((2, 2, 4)), [0.5, 1.5], {}, "counts"),
     (np.zeros((2, 2, 4)), [1, 1], {"targets": np.zeros(2)}, "targets"),
     (np.zeros((2, 2, 4)), [1, 1], {"biases": np.full((2, 2), np.inf)}, "biases")],
)  # fmt: skip
def test_class_losses_are_checked(
    means: np.ndarray, counts: list[float], more: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        class_losses(means, counts, **more)


SLOTS = Space.of([(1, 6, 0), (1, 4, None), (3, 5, 4)])


@pytest.mark.parametrize("kind", [*KINDS, TPE])
def test_slots_have_their_own_candidates(kind: type[PromptSearch]) -> None:
    method = kind(space=SLOTS, num_samples=6, search=6, halving=2)
    state = method.init()
    assert (state.alpha[~SLOTS.mask] == 0).all()
    assert state.alpha[1, :4] == pytest.approx(0.25)
    assert method.cheapest(state, len)[0].tolist() == method.prompt(state).tolist()
    for step in range(8):
        candidates = method.ask(state, stream(step), method.wanted(state))
        assert SLOTS.holds(candidates.prompts)
        state = method.tell(state, candidates, candidates.prompts.sum(axis=1))
        method.check(state)
        assert (state.alpha[~SLOTS.mask] == 0).all()
        assert state.alpha[SLOTS.mask].min() > 0
    assert method.finished(state)
    assert method.project(state.alpha).tobytes() == state.alpha.tobytes()
    with pytest.raises(ValueError, match="does not have"):
        method.check(state.evolve(alpha=state.alpha + 0.01))


def test_slots_that_matter_together_are_found_together() -> None:
    """Neither of the two candidates is any good without the other."""
    space = Space.of([(1, 5, 0), (1, 5, 0), (1, 5, 0)])
    method = ThompsonSampling(space=space, num_samples=6)
    together = 0
    for seed in range(5):
        rng, state = np.random.default_rng(seed), method.init()
        for step in range(40):
            candidates = method.ask(state, stream(100 * seed + step))
            one, two, three = candidates.prompts.T
            losses = 0.1 * three + 0.2 * (one > 0) - 1.0 * ((one == 3) & (two == 4))
            losses += rng.normal() + 0.2 * rng.normal(size=6)
            state = method.tell(state, candidates, losses)
        together += method.prompt(state).tolist()[:2] == [3, 4] and state.alpha[0, 3] > 0.6
    # The pair must be drawn once to be known; how roundings fall decides when.
    assert together >= 3
