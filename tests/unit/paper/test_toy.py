from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_paper import Settings, find_study
from fedone_paper.toy import Digits, Mlp, Toy, ToyClients, load_digits, reached, run_toy
from fedone_sdk.errors import DataError
from fedone_sdk.evaluation.engine import Result, Workspace

SMALL: dict[str, Any] = {"num_clients": 5, "num_hidden": 8, "max_queries": 400, "measure_every": 50}


NETWORK = Mlp(num_inputs=4, num_hidden=6, num_classes=3, dropout=0.5)


def write_mnist(folder: Path, images: np.ndarray, labels: np.ndarray, packed: bool) -> None:
    for stem in "train", "t10k":
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            content = header + values.tobytes()
            path = folder / f"{stem}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


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

    def test_a_round_is_the_mean_weighted_by_rows(self, digits: Digits) -> None:
        clients = ToyClients(toy(2, dirichlet_alpha=0.5), digits)
        start = clients.network.init(np.random.default_rng(0))
        one, other = (clients.round(start, [client], 3) for client in (1, 4))
        both = clients.round(start, [1, 4], 3)
        held = [len(clients.shards[client]) for client in (1, 4)]
        assert held[0] != held[1]
        expected = np.average(np.stack([one, other]).astype(np.float64), axis=0, weights=held)
        np.testing.assert_allclose(both, expected, rtol=1e-6)


class TestRun:
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_folder_of_mnist(self, tmp_path: Path, packed: bool) -> None:
        images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
        labels = (np.arange(40) % 10).astype(np.uint8)
        write_mnist(tmp_path, images, labels, packed)
        digits = load_digits(tmp_path)
        np.testing.assert_allclose(digits.test_images[1], images[1].ravel() / 255, rtol=1e-6)
        assert digits.train_labels.tolist() == labels.tolist()
        trial = find_study("figure-toy").trials(Settings(data=tmp_path, seeds=1, quick=True), {})[0]
        options = {**trial.options, "max_queries": 10, "num_clients": 10, "measure_every": 10}
        found = run_toy(options, Workspace(inputs=trial.inputs, folder=tmp_path))
        assert (found["data"], found["pixels"], found["rows"]) == ("MNIST", 784, [4, 4, 4])

    def test_a_cut_file_is_refused(self, tmp_path: Path) -> None:
        write_mnist(tmp_path, np.zeros((2, 3, 4), np.uint8), np.zeros(2, np.uint8), False)
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match="train-images-idx3-ubyte: cannot be read: is no IDX"):
            load_digits(tmp_path)


class TestNetwork:
    def test_the_gradient_is_that_of_finite_differences(self) -> None:
        rng = np.random.default_rng(0)
        parameters = NETWORK.init(rng).astype(np.float64)
        images, labels = rng.random((5, 4)), np.array([0, 1, 2, 1, 1])
        mask = NETWORK.draw_mask(5, rng).astype(np.float64)
        assert 0 < np.count_nonzero(mask) < mask.size
        _, gradient = NETWORK.loss_and_gradient(parameters, images, labels, mask)

        def loss(change: np.ndarray) -> float:
            return NETWORK.loss_and_gradient(parameters + change, images, labels, mask)[0]

        steps = 1e-6 * np.eye(parameters.size)
        numeric = [(loss(row) - loss(-row)) / 2e-6 for row in steps]
        np.testing.assert_allclose(gradient, numeric, atol=1e-8)


class TestReached:
    def test_the_first_time_counts(self) -> None:
        result = curve((0, 0.1), (20, 0.7), (40, 0.6), (60, 0.8))
        assert [reached(result, target) for target in (0.1, 0.65, 0.75, 0.9)] == [0, 20, 60, None]


def test_the_figures_share_their_iid_runs() -> None:
    trials = find_study("figure-heterogeneity").trials(Settings(seeds=1), {})
    shared = [trial for trial in trials if trial.home == "figure-toy"]
    assert shared == list(find_study("figure-toy").trials(Settings(seeds=1), {}))
    assert {trial.home for trial in trials if trial not in shared} == {None}


def test_the_whole_figure_is_the_papers() -> None:
    trials = find_study("figure-heterogeneity").trials(Settings(seeds=2), {})
    assert len(trials) == 3 * 5 * 2
    assert {trial.options["clients_per_round"] for trial in trials} == {1, 5, 10, 20, 40}
    assert {trial.options["dirichlet_alpha"] for trial in trials} == {None, 0.5, 0.1}
    fixed = ("num_clients", "num_hidden", "learning_rate", "batch_size", "local_epochs")
    assert [trials[0].options[name] for name in fixed] == [100, 512, 0.01, 32, 2]
