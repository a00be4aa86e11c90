from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_paper.federated import Tuning
from fedone_paper.settings import Settings
from fedone_paper.time_to_target import Probing, noises, run_to_target, sampled, target_trial
from fedone_sdk.evaluation.engine import Result, Workspace

ROUNDS = 6


@pytest.fixture
def settings(glue: Path) -> Settings:
    return Settings(data=glue)


def tuning(**changed: Any) -> Tuning:
    method = {"name": "bdpl", "learning_rate": 0.1, "num_samples": 4, "batch_size": 4}
    small = {"num_clients": 3, "shots": 4, "prompt_len": 2, "vocab_size": 12, "rounds": ROUNDS}
    return Tuning(**{"task": "sst2", "method": method, **small, **changed})


def measured(settings: Settings, folder: Path, probing: Probing, **changed: Any) -> Result:
    trial = target_trial("one", settings, tuning(**changed), probing)
    return run_to_target(trial.options, Workspace(inputs=trial.inputs, folder=folder))


class TestSampled:
    def test_follows_alpha(self) -> None:
        alpha = np.array([[0.7, 0.2, 0.1], [0.01, 0.01, 0.98]], dtype=np.float32)
        drawn = sampled(alpha, noises((2, 3), count=4000, seed=0))
        shares = [np.bincount(drawn[:, position], minlength=3) / 4000 for position in (0, 1)]
        np.testing.assert_allclose(shares, alpha, atol=0.025)


class TestTimeToTarget:
    def test_does_not_hang_on_how_often_it_is_measured(
        self, settings: Settings, tmp_path: Path
    ) -> None:
        often, seldom = (
            measured(settings, tmp_path, Probing(queries=every, prompts=4, rows=4, prompt_rows=8))
            for every in (4, 12)
        )
        assert often["prompt"] == seldom["prompt"]
        by_round = {point["round"]: point for point in often["curve"]}
        assert all(point == by_round[point["round"]] for point in seldom["curve"])

    def test_ends_at_its_target(self, settings: Settings, tmp_path: Path) -> None:
        # Below the start by less than nothing: the first measurement is enough.
        probing = Probing(
            queries=4, prompts=4, rows=4, prompt_rows=8, gains={"expected_loss": -10.0}
        )
        found = measured(settings, tmp_path, probing, rounds=500)
        assert found["reached"] == {"expected_loss": 0}
        assert found["status"] == "stopped"
        assert found["rounds"] < 500
