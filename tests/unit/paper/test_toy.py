from __future__ import annotations

import struct
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedone_paper import Settings, find_study
from fedone_paper.digits import Digits, load_digits
from fedone_paper.figure_toy import reached
from fedone_paper.toy import Toy, ToyClients, run_toy
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.evaluation.engine import Result, Workspace

SMALL: dict[str, Any] = {"num_clients": 5, "num_hidden": 8, "max_queries": 400, "measure_every": 50}


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(inputs={}, folder=tmp_path)


def toy(clients: int, seed: int = 0, **changed: Any) -> Toy:
    return Toy(clients_per_round=clients, seed=seed, **{**SMALL, **changed})


def curve(*points: tuple[int, float]) -> Result:
    return {"queries": [q for q, _ in points], "accuracy": [a for _, a in points]}


class TestClients:
    def test_a_visit_costs_epochs_times_mini_batches(self, digits: Digits) -> None:
        clients = ToyClients(toy(1), digits)
        assert [len(shard) for shard in clients.shards] == [288, 288, 288, 287, 287]
        assert clients.cost([0]) == 2 * 9
        assert clients.cost([0, 4]) == 2 * (9 + 9)

    def test_the_smallest_client_still_costs(self, digits: Digits) -> None:
        clients = ToyClients(toy(1, num_clients=100, dirichlet_alpha=0.1), digits)
        smallest = min(range(100), key=lambda client: len(clients.shards[client]))
        assert len(clients.shards[smallest]) < 3
        assert clients.cost([smallest]) == 2

    def test_a_smaller_alpha_leaves_clients_fewer_classes(self, digits: Digits) -> None:
        def classes(alpha: float | None) -> float:
            shards = ToyClients(toy(1, num_clients=50, dirichlet_alpha=alpha), digits).shards
            return float(np.mean([len(set(digits.train_labels[shard])) for shard in shards]))

        assert classes(None) > classes(0.5) > classes(0.1)

    def test_one_client_goes_down_the_gradient(self, digits: Digits) -> None:
        settings = toy(1, local_epochs=1, batch_size=10**6)
        clients = ToyClients(settings, digits)
        start = clients.network.init(np.random.default_rng(0))
        moved = clients.round(start, [2], 0)
        rows = clients.shards[2]
        images, labels = digits.train_images[rows], digits.train_labels[rows]
        before, gradient = clients.network.loss_and_gradient(
            start, images, labels, np.ones((len(rows), 8), np.float32)
        )
        after, _ = clients.network.loss_and_gradient(
            moved, images, labels, np.ones((len(rows), 8), np.float32)
        )
        assert after < before
        direction = (start - moved) / settings.learning_rate
        cosine = direction @ gradient / np.linalg.norm(direction) / np.linalg.norm(gradient)
        assert cosine > 0.8  # dropout changes it, the sign does not

    def test_a_round_is_the_mean_weighted_by_rows(self, digits: Digits) -> None:
        clients = ToyClients(toy(2, dirichlet_alpha=0.5), digits)
        start = clients.network.init(np.random.default_rng(0))
        one, other = (clients.round(start, [client], 3) for client in (1, 4))
        both = clients.round(start, [1, 4], 3)
        held = [len(clients.shards[client]) for client in (1, 4)]
        assert held[0] != held[1]
        expected = np.average(np.stack([one, other]).astype(np.float64), axis=0, weights=held)
        np.testing.assert_allclose(both, expected, rtol=1e-6)

    def test_rounds_stop_before_they_pass_the_cap(self, digits: Digits) -> None:
        clients = ToyClients(toy(2, max_queries=100), digits)
        rounds = list(clients.rounds())
        assert len(rounds) == 100 // clients.cost(rounds[0]) == 2
        assert all(chosen == sorted(set(chosen)) and len(chosen) == 2 for chosen in rounds)

    def test_who_is_chosen_hangs_on_the_seed(self, digits: Digits) -> None:
        def chosen(seed: int) -> list[list[int]]:
            settings = toy(1, seed=seed, max_queries=10**6)
            return list(islice(ToyClients(settings, digits).rounds(), 20))

        assert chosen(0) == chosen(0) != chosen(1)
        assert {client for row in chosen(0) for client in row} == set(range(5))


class TestRun:
    def test_it_learns_and_is_the_same_again(self, workspace: Workspace) -> None:
        options = asdict(toy(1, learning_rate=0.1))
        first = run_toy(options, workspace)
        assert first == run_toy(options, workspace)
        assert first["accuracy"][0] < 0.3 < 0.8 < first["accuracy"][-1]
        assert first["queries"][0] == 0
        assert first["visits"] == first["rounds"] == 400 // 18
        assert first["queries"][-1] <= 400
        assert first["rows"] == [287, 288, 288]
        assert first["pixels"] == 64

    def test_it_is_measured_when_queries_are_due(self, workspace: Workspace) -> None:
        queries = run_toy(asdict(toy(2)), workspace)["queries"]
        # Rounds of 36 queries; the first that ends past each multiple of 50.
        assert queries == [0, 72, 108, 180, 216, 252, 324, 360]

    def test_fewer_clients_a_round_take_more_rounds(self, workspace: Workspace) -> None:
        one, four = (run_toy(asdict(toy(clients)), workspace) for clients in (1, 4))
        assert (one["visits"], one["rounds"]) == (22, 22)
        assert (four["visits"], four["rounds"]) == (20, 5)

    def test_a_cap_that_pays_nothing(self, workspace: Workspace) -> None:
        with pytest.raises(SpecError, match="max_queries: 1 do not pay for a measurement of K"):
            run_toy(asdict(toy(1, max_queries=1)), workspace)

    def test_what_holds_no_digits_is_refused_before_the_work(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has no train-images-idx3-ubyte"):
            find_study("figure-toy").trials(Settings(data=tmp_path), {})

    def test_a_folder_of_mnist(self, tmp_path: Path) -> None:
        images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
        labels = (np.arange(40) % 10).astype(np.uint8)
        for stem in "train", "t10k":
            for name, values in (("images-idx3", images), ("labels-idx1", labels)):
                header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
                (tmp_path / f"{stem}-{name}-ubyte").write_bytes(header + values.tobytes())
        settings = Settings(data=tmp_path, seeds=1, quick=True)
        trial = find_study("figure-toy").trials(settings, {})[0]
        options = {**trial.options, "max_queries": 10, "num_clients": 10, "measure_every": 10}
        found = run_toy(options, Workspace(inputs=trial.inputs, folder=tmp_path))
        assert (found["data"], found["pixels"], found["rows"]) == ("MNIST", 784, [4, 4, 4])


class TestReached:
    def test_the_first_time_counts(self) -> None:
        result = curve((0, 0.1), (20, 0.7), (40, 0.6), (60, 0.8))
        assert [reached(result, target) for target in (0.1, 0.65, 0.75, 0.9)] == [0, 20, 60, None]


def small_report(one: list[int | None], other: list[int | None]) -> str:
    """The report of runs of K* = 1 and 5 that reach 90 % after so many queries."""
    results = {
        f"iid_k{clients}_s{seed}": {
            **curve((0, 0.1), (20, 0.2), (at or 1000, 0.2 if at is None else 0.95)),
            "rows": [14, 14, 15],
            "data": "digits",
            "pixels": 64,
        }
        for clients, reaches in ((1, one), (5, other))
        for seed, at in enumerate(reaches)
    }
    settings = Settings(seeds=len(one), options={"max_queries": "1000"})
    return find_study("figure-toy").report(settings, results).markdown


class TestReport:
    def test_shown(self) -> None:
        text = small_report([100, 110, 120, 90, 100, 100], [300, 310, 290, 280, 320, None])
        assert "| 1 | 100 | 100 | 100 | 95.0 ± 0.0 |" in text
        assert "| 5 | 300 (1 of 6 never) |" in text
        assert "- To 90%: K*=1 needed the fewest queries" in text
        assert "in 6 of 6 repeats that differ" in text

    def test_a_censored_one_counts_as_endless(self) -> None:
        text = small_report([100, None, 100, 100, 100], [500] * 5)
        assert "- To 90%: That K*=1 needs the fewest queries is **not shown**" in text
        assert "in 4 of 5 repeats that differ" in text

    def test_few_seeds_conclude_nothing(self) -> None:
        assert "- To 90%: That K*=1 needs the fewest queries is **not shown**" in small_report(
            [100] * 2, [900] * 2
        )


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("figure-toy", ["IID"]),
        ("figure-heterogeneity", ["IID", "Dirichlet 0.5", "Dirichlet 0.1"]),
    ],
)
def test_the_quick_figure(name: str, labels: list[str], tmp_path: Path) -> None:
    experiment, settings = find_study(name), Settings(seeds=1, quick=True)
    trials = experiment.trials(settings, {})
    assert len(trials) == len({trial.key for trial in trials}) == 3 * len(labels)
    results = {
        trial.key: trial.run(
            {**trial.options, "max_queries": 200, "num_hidden": 16},
            Workspace(inputs=trial.inputs, folder=tmp_path),
        )
        for trial in trials[1:]  # the first has failed
    }
    report = experiment.report(settings, results)
    assert "MLP 64-512-10 with dropout 0.2" in report.data["caption"]
    assert "scikit-learn's 8x8 digits" in report.markdown
    assert [split["label"] for split in report.data["splits"]] == labels
    figure = Figure()
    report.figures[experiment.name](figure)
    assert [axes.get_title() for axes in figure.axes] == labels
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "K*=10",
        "K*=40",
    ]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_the_figures_share_their_iid_runs() -> None:
    trials = find_study("figure-heterogeneity").trials(Settings(seeds=1), {})
    shared = [trial for trial in trials if trial.home == "figure-toy"]
    assert shared == list(find_study("figure-toy").trials(Settings(seeds=1), {}))
    assert {trial.home for trial in trials if trial not in shared} == {None}


def test_options_change_the_trials() -> None:
    options = {"learning_rate": "0.1", "max_queries": "500"}
    (trial, *_) = find_study("figure-toy").trials(Settings(seeds=1, options=options), {})
    assert (trial.options["learning_rate"], trial.options["max_queries"]) == (0.1, 500)


@pytest.mark.parametrize("value", ["fast", "0", "-1", "nan", "inf"])
def test_an_option_that_is_no_rate(value: str) -> None:
    with pytest.raises(SpecError, match="--set learning_rate: must be a positive number"):
        find_study("figure-toy").trials(Settings(seeds=1, options={"learning_rate": value}), {})


def test_the_whole_figure_is_the_papers() -> None:
    trials = find_study("figure-heterogeneity").trials(Settings(seeds=2), {})
    assert len(trials) == 3 * 5 * 2
    assert {trial.options["clients_per_round"] for trial in trials} == {1, 5, 10, 20, 40}
    assert {trial.options["dirichlet_alpha"] for trial in trials} == {None, 0.5, 0.1}
    fixed = ("num_clients", "num_hidden", "learning_rate", "batch_size", "local_epochs")
    assert [trials[0].options[name] for name in fixed] == [100, 512, 0.01, 32, 2]
