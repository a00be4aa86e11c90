"""The tables of the slot bench in docs/benchmarks, and runs on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
