"""Label bias: the grid, losses by class on it, and biases found without labels."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.calibration import MAX_LABELS, bias_grid, class_losses
from fedone_sdk.task import LOG_ZERO, TaskSpec, label_loss


def task_of(num_labels: int) -> TaskSpec:
    labels = {str(label): f" w{label}" for label in range(num_labels)}
    return TaskSpec(template="{prompt} {text} {mask}", labels=labels)


class TestGrid:
    @pytest.mark.parametrize(("num_labels", "size"), [(2, 9), (3, 49), (4, 125)])
    def test_all_combinations_and_zero_in_the_middle(self, num_labels: int, size: int) -> None:
        grid = bias_grid(num_labels)
        assert len(grid) == len(set(grid)) == size
        assert grid[size // 2] == (0.0,) * num_labels
        assert all(bias[0] == 0.0 and len(bias) == num_labels for bias in grid)
        # The same from either side of zero: no label is liked better than another.
        assert {tuple(-value for value in bias) for bias in grid} == set(grid)

    def test_the_last_label_runs_fastest(self) -> None:
        assert bias_grid(2) == tuple((0.0, float(offset)) for offset in range(-4, 5))
        assert bias_grid(4)[:6] == (
            (0.0, -2.0, -2.0, -2.0),
            (0.0, -2.0, -2.0, -1.0),
            (0.0, -2.0, -2.0, 0.0),
            (0.0, -2.0, -2.0, 1.0),
            (0.0, -2.0, -2.0, 2.0),
            (0.0, -2.0, -1.0, -2.0),
        )

    @pytest.mark.parametrize("num_labels", [0, 1, MAX_LABELS + 1])
    def test_for_few_labels_only(self, num_labels: int) -> None:
        with pytest.raises(ValueError, match=f"2 to {MAX_LABELS} labels, not for {num_labels}"):
            bias_grid(num_labels)


class TestClassLosses:
    def test_by_hand(self) -> None:
        """p(0) is 3/4 for two examples of class 0, and 1/2 for one of class 1."""
        sure, torn = [math.log(0.75), math.log(0.25)], [math.log(0.5), math.log(0.5)]
        found = class_losses(task_of(2), [sure, torn, sure], [0, 1, 0])
        assert found.counts == (2, 1)
        for place, (_, offset) in enumerate(bias_grid(2)):
            odds = math.exp(offset)
            assert found.means[0][place] == pytest.approx(-math.log(0.75 / (0.75 + 0.25 * odds)))
            assert found.means[1][place] == pytest.approx(-math.log(odds / (1 + odds)))

    def test_a_class_without_examples_is_zero(self) -> None:
        found = class_losses(task_of(3), [[-1.0, -2.0, -3.0]], [1])
        assert found.counts == (0, 1, 0)
        assert set(found.means[0]) == set(found.means[2]) == {0.0}
        assert all(mean > 0 for mean in found.means[1])

    @given(st.data())
    def test_is_the_mean_of_the_task_s_loss_under_each_bias(self, data: st.DataObject) -> None:
        num_labels = data.draw(st.sampled_from([2, 3, 4]))
        value = st.floats(-30, 0) | st.just(LOG_ZERO)
        example = st.tuples(
            st.lists(value, min_size=num_labels, max_size=num_labels),
            st.integers(0, num_labels - 1),
        )
        examples = data.draw(st.lists(example, min_size=1, max_size=6))
        task = task_of(num_labels)
        found = class_losses(task, [row for row, _ in examples], [at for _, at in examples])
        assert sum(found.counts) == len(examples)
        for place, bias in enumerate(bias_grid(num_labels)):
            biased = task.with_bias(bias)
            losses = [label_loss(biased, row, target) for row, target in examples]
            mixed = sum(
                count * mean[place] for count, mean in zip(found.counts, found.means, strict=True)
            ) / len(examples)
            assert mixed == pytest.approx(sum(losses) / len(losses), rel=1e-12, abs=1e-12)

    def test_the_grid_takes_the_place_of_the_task_s_own_bias(self) -> None:
        rows, targets = [[-1.0, -2.0]], [0]
        biased = task_of(2).with_bias((0.0, 3.0))
        assert class_losses(biased, rows, targets) == class_losses(task_of(2), rows, targets)

    def test_needs_a_target_for_each_row(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            class_losses(task_of(2), [[-1.0, -2.0]], [])
