"""figure-toy and figure-heterogeneity: queries against accuracy for several K*, on digits.

Clients train a network with one hidden layer, and the server averages its parameters.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_paper.queries import Repeats
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.tables import Column, about, mean_curve, mean_sd_text, table
from fedone_sdk.algorithms import aggregate, select, stream, stream_seed
from fedone_sdk.data import SplitMix64, dirichlet, iid
from fedone_sdk.errors import DataError, needs_extra
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.reports import Line, Panel, svg_of

Floats = NDArray[np.floating]

NUM_CLASSES = 10

TARGETS = (0.7, 0.8, 0.9)
"""Test accuracies to reach; fixed in advance, so that they do not depend on the results."""

_POINTS = 150
"""Number of points of a curve."""

_TEST_SHARE = 0.2
"""Share of the 8x8 digits that becomes the test split."""

_SPLITS: Mapping[str, tuple[str, float | None]] = {
    "iid": ("IID", None),
    "dirichlet0.5": ("Dirichlet 0.5", 0.5),
    "dirichlet0.1": ("Dirichlet 0.1", 0.1),
}
"""Partitions of the digits over clients: the name in reports, and the Dirichlet parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images, float32 in [0, 1] of shape (rows, pixels), and labels, int64 of shape (rows,)."""

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    @property
    def num_pixels(self) -> int:
        """Pixels of an image: 784 for MNIST, 64 for the 8x8 digits."""
        return int(self.train_images.shape[1])


def load_digits(folder: Path | None = None) -> Digits:
    """Read MNIST, or the digits of scikit-learn.

    Args:
        folder: Folder of MNIST's four IDX files, plain or gzipped (``train-images-idx3-ubyte``,
            ``train-labels-idx1-ubyte``, ``t10k-...``). If None, scikit-learn's 1,797 digits are
            used; a fixed fifth of them is the test split.

    Raises:
        DataError: The folder does not have the files, or a file cannot be used.
        MissingExtraError: scikit-learn is not installed.
    """
    if folder is not None:
        parts: dict[str, Any] = {}
        for split, stem in ("train", "train"), ("test", "t10k"):
            images, labels = _idx(folder, f"{stem}-images", 3), _idx(folder, f"{stem}-labels", 1)
            if len(labels) != len(images) or not len(images) or labels.max() >= NUM_CLASSES:
                raise DataError(f"{folder}: there must be one {split} label of 0 to 9 per image")
            scaled = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
            parts |= {f"{split}_images": scaled, f"{split}_labels": labels.astype(np.int64)}
        return Digits(name="MNIST", **parts)
    with needs_extra("the bundled digits", "reproduce"):
        from sklearn import datasets
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    rows = SplitMix64(0).shuffle(range(len(labels)))
    held_out = round(len(rows) * _TEST_SHARE)
    return Digits(
        name="scikit-learn's 8x8 digits",
        train_images=images[rows[held_out:]],
        train_labels=labels[rows[held_out:]],
        test_images=images[rows[:held_out]],
        test_labels=labels[rows[:held_out]],
    )


def _idx(folder: Path, stem: str, dimensions: int) -> Any:
    """Return a file's data as an array; the header is 0, 0, 8, the number of sizes, the sizes."""
    path = folder / f"{stem}-idx{dimensions}-ubyte"
    packed = path.with_name(f"{path.name}.gz")
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
        sizes = struct.unpack_from(f">{dimensions}I", content, 4)
        values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
        if content[:4] != bytes((0, 0, 8, dimensions)) or len(values) != math.prod(sizes):
            raise ValueError(f"is no IDX file of bytes in {dimensions} dimensions")
    except (OSError, EOFError, struct.error, ValueError) as exc:
        raise DataError(f"{path}: cannot be read: {exc}") from exc
    return values.reshape(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A network with one ReLU layer and dropout. Its parameters are one vector, for averaging.

    Methods are pure functions of their arguments. They compute in the parameters' dtype. Images
    have the shape (rows, num_inputs), labels (rows,), parameters (size,).

    Attributes:
        num_inputs: Number of pixels.
        num_hidden: Width of the hidden layer.
        num_classes: Number of outputs.
        dropout: Probability that a training step omits a hidden unit.
    """

    num_inputs: int
    num_hidden: int = 512
    num_classes: int = NUM_CLASSES
    dropout: float = 0.2

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights and biases in the parameter vector."""
        hidden, classes = self.num_hidden, self.num_classes
        return (self.num_inputs, hidden), (hidden,), (hidden, classes), (classes,)

    def init(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Draw parameters, uniform within 1/sqrt(inputs of the layer), as torch's linear layer."""
        w1, b1, w2, b2 = map(math.prod, self.shapes)
        bounds = [1 / math.sqrt(self.num_inputs), 1 / math.sqrt(self.num_hidden)]
        scales = np.repeat(bounds, [w1 + b1, w2 + b2])
        drawn: NDArray[np.float32] = ((2 * rng.random(len(scales)) - 1) * scales).astype(np.float32)
        return drawn

    def draw_mask(self, num_rows: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Draw a dropout mask, divided by the keep probability; shape (num_rows, num_hidden)."""
        stays = rng.random((num_rows, self.num_hidden), dtype=np.float32) >= self.dropout
        return stays.astype(np.float32) / np.float32(1 - self.dropout)

    def predict(self, parameters: Floats, images: Floats) -> NDArray[np.int64]:
        """Return the likeliest class of each image; without dropout."""
        w1, b1, w2, b2 = self._layers(parameters)
        scores = np.maximum(images @ w1 + b1, 0) @ w2 + b2
        classes: NDArray[np.int64] = np.argmax(scores, axis=1)
        return classes

    def loss_and_gradient(
        self, parameters: Floats, images: Floats, labels: NDArray[np.int64], mask: Floats
    ) -> tuple[float, Floats]:
        """Return the mean cross-entropy of a mini-batch, nats, and its gradient.

        Args:
            parameters: Shape (size,).
            images: Shape (rows, num_inputs).
            labels: Shape (rows,).
            mask: A mask from `draw_mask`.
        """
        w1, b1, w2, b2 = self._layers(parameters)
        rows = np.arange(len(labels))
        active = np.maximum(images @ w1 + b1, 0)
        kept = active * mask
        scores = kept @ w2 + b2
        scores -= scores.max(axis=1, keepdims=True)
        log_probs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

        # d loss / d scores = (softmax - one-hot) / rows; from there the chain rule, layer by layer.
        slope = np.exp(log_probs)
        slope[rows, labels] -= 1
        slope /= len(labels)
        hidden_slope = (slope @ w2.T) * mask * (active > 0)
        parts = (
            images.T @ hidden_slope,
            hidden_slope.sum(axis=0),
            kept.T @ slope,
            slope.sum(axis=0),
        )
        gradient = np.concatenate([part.ravel() for part in parts])
        return -float(log_probs[rows, labels].mean()), gradient

    def _layers(self, parameters: Floats) -> list[Floats]:
        """Return views of the weights and biases."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = np.split(parameters, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """One toy federation; the defaults are the paper's.

    Attributes:
        clients_per_round: K*.
        dirichlet_alpha: Dirichlet parameter of the clients' class shares; None for IID clients.
        num_clients: K.
        num_hidden: Width of the hidden layer.
        local_epochs: Passes over a client's rows in one visit. The last mini-batch may be smaller.
        max_queries: Cap on queries; a round that would exceed it does not start.
        measure_every: Queries between two measurements of the test accuracy.
    """

    clients_per_round: int
    seed: int
    dirichlet_alpha: float | None = None
    num_clients: int = 100
    num_hidden: int = 512
    learning_rate: float = 0.01
    batch_size: int = 32
    local_epochs: int = 2
    max_queries: int = 24_000
    measure_every: int = 20

    def stream(self, purpose: str, round_number: int = 0, client: int = 0) -> np.random.Generator:
        """Return the random stream of a purpose."""
        return stream(stream_seed(self.seed, purpose, round_number, client))


def run_toy(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a toy federation to the end of its queries.

    A query is the forward pass of one mini-batch, in place of a call of the language model. A
    client's visit has ``local_epochs * ceil(rows / batch_size)`` queries.

    Args:
        options: The fields of `Toy`.
        workspace: Has the input ``data``, unless scikit-learn's digits are used.

    Returns:
        ``queries`` and ``accuracy`` (the curve on the test split), ``rounds``, ``visits``,
        ``data``, ``pixels``, and the ``rows`` of the smallest, median and largest client.
    """
    toy, digits = Toy(**options), load_digits(workspace.inputs.get("data"))
    clients = ToyClients(toy, digits)
    parameters = clients.network.init(toy.stream("toy-init"))
    queries, due, visits = 0, toy.measure_every, 0
    curve = [(0, clients.accuracy(parameters))]
    for round_number, chosen in enumerate(clients.rounds()):
        parameters = clients.round(parameters, chosen, round_number)
        visits += len(chosen)
        queries += clients.cost(chosen)
        if queries >= due:
            curve.append((queries, clients.accuracy(parameters)))
            due = queries - queries % toy.measure_every + toy.measure_every
    sizes = sorted(map(len, clients.shards))
    return {
        "queries": [point[0] for point in curve],
        "accuracy": [point[1] for point in curve],
        "rounds": round_number + 1,
        "visits": visits,
        "data": digits.name,
        "pixels": digits.num_pixels,
        "rows": [sizes[0], sizes[len(sizes) // 2], sizes[-1]],
    }


class ToyClients:
    """The clients of a toy federation, and the server's averaging.

    Attributes:
        network: The network that the clients train.
        shards: Each client's rows of the training split.
    """

    def __init__(self, toy: Toy, digits: Digits) -> None:
        self._toy, self._digits = toy, digits
        self.network = Mlp(num_inputs=digits.num_pixels, num_hidden=toy.num_hidden)
        labels, seed = digits.train_labels.tolist(), stream_seed(toy.seed, "toy-partition", 0)
        if toy.dirichlet_alpha is None:
            self.shards = iid(len(labels), toy.num_clients, seed)
        else:
            self.shards = dirichlet(labels, toy.num_clients, toy.dirichlet_alpha, seed)

    def cost(self, chosen: Sequence[int]) -> int:
        """Return the queries of a round."""
        toy = self._toy
        batches = (math.ceil(len(self.shards[client]) / toy.batch_size) for client in chosen)
        return toy.local_epochs * sum(batches)

    def rounds(self) -> Iterator[list[int]]:
        """Yield the clients of each round, by index, up to the cap on queries."""
        held = {client: len(shard) for client, shard in enumerate(self.shards)}
        round_number, spent = 0, 0
        while True:
            rng = self._toy.stream("selection", round_number)
            chosen = sorted(select(held, self._toy.clients_per_round, rng=rng))
            spent += self.cost(chosen)
            if spent > self._toy.max_queries:
                return
            yield chosen
            round_number += 1

    def round(
        self, parameters: NDArray[np.float32], chosen: Sequence[int], round_number: int
    ) -> NDArray[np.float32]:
        """Do a round of FedAvg (McMahan et al. 2017): clients train from the same parameters.

        Their results are averaged, weighted by the clients' numbers of rows.
        """
        trained = [self._train(parameters, client, round_number) for client in chosen]
        return aggregate(trained, [len(self.shards[client]) for client in chosen])

    def accuracy(self, parameters: NDArray[np.float32]) -> float:
        """Return the share of the test split that is classified correctly."""
        found = self.network.predict(parameters, self._digits.test_images)
        return float(np.mean(found == self._digits.test_labels))

    def _train(
        self, parameters: NDArray[np.float32], client: int, round_number: int
    ) -> NDArray[np.float32]:
        toy, network, shard = self._toy, self.network, np.array(self.shards[client])
        images, labels = self._digits.train_images, self._digits.train_labels
        rng = toy.stream("toy-training", round_number, client)
        trained = parameters.copy()
        for _ in range(toy.local_epochs):
            order = np.argsort(rng.random(len(shard)), kind="stable")
            for start in range(0, len(shard), toy.batch_size):
                rows = shard[order[start : start + toy.batch_size]]
                mask = network.draw_mask(len(rows), rng)
                _, gradient = network.loss_and_gradient(trained, images[rows], labels[rows], mask)
                trained -= np.float32(toy.learning_rate) * gradient
        return trained


class FigureToy(Study):
    """The paper's toy example: one network, 100 clients, several K*; a panel per partition."""

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a point; both figures use the IID runs."""
        return Trial(
            key=key,
            run=run_toy,
            options=asdict(self._toy(settings, point)),
            inputs={} if settings.data is None else {"data": settings.data},
            home="figure-toy" if point["split"] == "iid" else None,
        )

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the curves, the queries to targets, and whether K*=1 needs the fewest."""
        toy = self._toy(settings, {"split": "iid", "clients_per_round": 1, "seed": 0})
        found = [
            Repeats(label=_SPLITS[split][0], cap=toy.max_queries, runs=_to_targets(runs))
            for split in self.grid(settings)["split"]
            if (runs := self.runs(settings, results, split=split))
        ]
        some, rows = next(iter(results.values())), [result["rows"] for result in results.values()]
        held = f"{min(row[0] for row in rows)} to {max(row[2] for row in rows)}"
        facts = {**asdict(toy), "data": some["data"], "pixels": some["pixels"], "held": held}
        parts = [
            f"![{self.title}]({self.name}.svg)",
            self.text("caption", **facts),
            *([self.text("bundled", **facts)] if some["pixels"] == 64 else []),
            about(self.name),
            *(_section(repeats) for repeats in found),
        ]
        figure = svg_of([_panel(repeats) for repeats in found])
        return Report(markdown="\n\n".join(parts), figures={self.name: figure})

    def _toy(self, settings: Settings, point: Point) -> Toy:
        return Toy(
            clients_per_round=point["clients_per_round"],
            seed=point["seed"],
            dirichlet_alpha=_SPLITS[point["split"]][1],
            # MNIST's test split is large, and a visit with MNIST has 38 queries.
            measure_every=20 if settings.data is None else 200,
            **self.run(settings),
        )


def reached(result: Result, target: float) -> int | None:
    """Return the queries until the test accuracy first reached a target; None if it did not."""
    points = zip(result["queries"], result["accuracy"], strict=True)
    return next((queries for queries, accuracy in points if accuracy >= target), None)


def _to_targets(runs: Mapping[int, Mapping[int, Result]]) -> dict[int, dict[int, Result]]:
    """Add to each result the queries to each target."""
    return {
        clients: {
            seed: {**run, "reached": {f"{target:.0%}": reached(run, target) for target in TARGETS}}
            for seed, run in found.items()
        }
        for clients, found in runs.items()
    }


def _section(repeats: Repeats) -> str:
    """Return the medians, and whether K*=1 needs the fewest queries to each target."""
    targets = [f"{target:.0%}" for target in TARGETS]
    columns: dict[str, Column] = {
        f"to {target}": partial(repeats.median_text, target) for target in targets
    }
    columns["accuracy at the end"] = lambda _, runs: mean_sd_text(
        run["accuracy"][-1] for run in runs.values()
    )
    verdicts = "\n".join(f"- To {target}: {repeats.verdict(target)}" for target in targets)
    return f"## {repeats.label}\n\n{table('K*', repeats.runs, columns)}\n{verdicts}"


def _panel(repeats: Repeats) -> Panel:
    """Return the mean test accuracy over queries of each K*, +/- one standard deviation."""
    lines = []
    for clients, runs in repeats.runs.items():
        # Without the first point: a logarithmic axis has no 0.
        curves = [[*zip(run["queries"], run["accuracy"], strict=True)][1:] for run in runs.values()]
        start = max(curve[0][0] for curve in curves)
        grid = np.geomspace(start, max(start, curves[0][-1][0]), _POINTS).tolist()
        x, y, spread = mean_curve(curves, grid)
        label = f"K*={clients}"
        lines.append(Line(x=x, y=y, error=(spread, spread), band=True, label=label))
    return Panel(
        lines=lines,
        log="x",
        x="queries (mini-batch forward passes)",
        y="test accuracy",
        title=repeats.label,
    )
