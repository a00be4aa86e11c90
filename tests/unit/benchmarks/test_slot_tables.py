"""The tables of the slot bench in docs/benchmarks, and runs on them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.bootstrap import paired_difference
from tests.benchmarks.slot_cells import CELLS
from tests.benchmarks.slot_runs import CONTESTANTS, TABLES, Federation, Table, trial

FILES = sorted(TABLES.glob("*.npz"))


def test_the_tables_are_of_cells() -> None:
    assert {file.stem for file in FILES} == CELLS.keys() - {"roberta-mini-sst2"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_table_is_complete(file: Path) -> None:
    table, cell = Table(file), CELLS[file.stem]
    assert table.sizes == cell.sizes
    assert table.log_probs.shape == (np.prod(cell.sizes), cell.num_rows, len(cell.labels))
    assert (table.log_probs <= 0.0).all()
    assert table.best(table.oracle).loss < table.best(table.none).loss


@pytest.mark.parametrize("liars", [0, 2])
def test_a_run_repeats_itself(liars: int) -> None:
    table = Table(TABLES / "gemma-sst2.npz")
    federation = Federation(table=table, clients=8, batch_size=16, liars=liars, seed=3)
    first, second = (trial(CONTESTANTS["thompson"], federation, 50) for _ in range(2))
    assert first == second
    assert 40 <= first["spent"] <= 50  # the halving asks about fewer prompts
    losses = [table.best(table.oracle).loss, first["best_loss"], first["loss"]]
    assert np.diff(losses).min() >= -1e-5  # The fits of their biases end within this.


def test_the_default_finds_a_better_prompt() -> None:
    table = Table(TABLES / "gemma-sst2.npz")
    federation = Federation(table=table, clients=8, batch_size=16, seed=0)
    found = trial(CONTESTANTS["thompson"], federation, 300)
    assert found["loss"] < table.best(table.none).loss - 0.1


class TestDifference:
    def test_pairing_removes_the_variance_between_seeds(self) -> None:
        rng = np.random.default_rng(2)
        seeds = rng.normal(0.0, 10.0, 20)
        found = paired_difference(
            (seeds + rng.normal(-1.0, 0.2, 20)).tolist(), seeds.tolist()
        )  # fmt: skip
        assert found.low < -1.0 < found.high < -0.8

    def test_covers_the_true_mean_of_few_pairs(self) -> None:
        rng = np.random.default_rng(3)
        held = 0
        for _ in range(200):
            found = paired_difference(rng.normal(0.5, 1.0, 20).tolist(), [0.0] * 20)
            held += found.low <= 0.5 <= found.high
        assert 0.90 <= held / 200 <= 0.99

    def test_one_pair_has_no_bounds(self) -> None:
        found = paired_difference([2.0], [1.5])
        assert found == (0.5, -math.inf, math.inf)

    def test_rejects_other_lengths_infinity_and_no_pairs(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            paired_difference([1.0], [1.0, 2.0])
        with pytest.raises(ValueError, match="finite"):
            paired_difference([math.inf], [1.0])
        with pytest.raises(ValueError, match="at least one"):
            paired_difference([], [])
