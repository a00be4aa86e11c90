"""Means, deviations and tables."""

from __future__ import annotations

import numpy as np
import pytest

from fedone_paper.summary import markdown_table, mean_curve, mean_sd, mean_sd_text


def test_mean_and_sample_deviation() -> None:
    values = [0.71, 0.64, 0.69, 0.75]
    mean, deviation = mean_sd(values)
    assert mean == pytest.approx(np.mean(values))
    assert deviation == pytest.approx(np.std(values, ddof=1))
    assert mean_sd([0.5]) == (0.5, None)
    with pytest.raises(ValueError, match="no values"):
        mean_sd([])


def test_as_text() -> None:
    assert mean_sd_text([0.70, 0.74]) == "72.0 ± 2.8"
    assert mean_sd_text([0.7]) == "70.0"
    assert mean_sd_text([]) == "-"
    assert mean_sd_text([2000, 2000], scale=1, digits=0) == "2000 ± 0"


def test_a_table() -> None:
    assert markdown_table(["a", "b"], [["x|y", "1"], ["z", "2"]]) == (
        "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| z | 2 |\n"
    )


def test_a_mean_curve_ends_with_the_shortest() -> None:
    x, means, deviations = mean_curve([[(20, 0.5), (40, 0.6), (60, 0.7)], [(20, 0.7), (40, 0.6)]])
    assert x == [20, 40]
    assert means == pytest.approx([0.6, 0.6])
    assert deviations == pytest.approx([2**0.5 / 10, 0.0])
    assert mean_curve([[(0, 1.0), (30, 4.0)], [(0, 1.0), (10, 1.0), (20, 1.0)]])[1] == [1, 1.5, 2]
    assert mean_curve([[(0, 1.0)]]) == ([0], [1.0], [0.0])
