"""Updates that the machine rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.messages import Scored, Tensor
from tests.unit.machine.game import ALPHA, LOSSES, SAMPLES, Game, both, refusal, spec_of

MAX_ALPHA = 1e6


class TestBadUpdates:
    def refused(self, game: Game, work: Any, update: Any) -> str:
        before = game.state
        refused = refusal(game.send(work, update))
        assert refused.code == "invalid_message"
        assert game.state is before
        game.send(work)  # and the right one is still welcome
        assert game.state.round == 1
        return refused.detail

    @pytest.mark.parametrize(
        ("alpha", "detail"),
        [
            (Tensor.pack([0.5] * 9, (3, 3), "float32"), "float32 [3, 3]"),
            (Tensor.pack([0.5] * 6, (3, 2), "float32"), "float32 [3, 2]"),
            (Tensor.pack([0.5] * 6, (6,), "float32"), "float32 [6]"),
            (Tensor.pack([1] * 6, (2, 3), "uint8"), "uint8 [2, 3]"),
            (Tensor.pack([0.5] * 5 + [0.0], (2, 3), "float32"), "outside what the method allows"),
            (Tensor.pack([0.5] * 5 + [1e-9], (2, 3), "float32"), "outside what the method allows"),
            (Tensor.pack([0.5] * 5 + [-0.5], (2, 3), "float32"), "must be positive"),
            (Tensor.pack([0.0] * 6, (2, 3), "float32"), "must be positive"),
            (Tensor.pack([MAX_ALPHA + 1.0] * 6, (2, 3), "float32"), "an entry is above 1e+06"),
            (Tensor.pack([3.4e38] * 6, (2, 3), "float32"), "an entry is above 1e+06"),
        ],
        ids=str,
    )
    def test_alphas(self, alpha: Tensor, detail: str) -> None:
        game = Game(spec_of(participation=ALPHA))
        work = game.take()
        assert detail in self.refused(game, work, game.update_for(work, alpha=alpha))

    @pytest.mark.parametrize("count", [3, 5])
    def test_number_of_losses(self, count: int) -> None:
        game = Game(spec_of(participation=LOSSES))
        work = game.take()
        update = game.update_for(work, losses=(0.5,) * count)
        assert self.refused(game, work, update) == f"losses: {count} were sent for 4 prompts"

    def test_the_other_exchange(self) -> None:
        losses, alpha = Game(spec_of(participation=LOSSES)), Game(spec_of(participation=ALPHA))
        works = [game.take() for game in (losses, alpha)]
        updates = [g.update_for(w) for g, w in zip((losses, alpha), works, strict=True)]
        assert "the run's is 'losses'" in self.refused(losses, works[0], updates[1])
        assert "the run's is 'alpha'" in self.refused(alpha, works[1], updates[0])

    @both
    @pytest.mark.parametrize(
        ("scored", "welcome"),
        [
            (Scored(scored=8, failed=1, vetoed=1), True),
            (Scored(scored=4, failed=1), True),
            (Scored(scored=79, failed=21), False),
            (Scored(scored=3, vetoed=1), False),
            (Scored(scored=0), False),
            (Scored(scored=0, failed=5), False),
        ],
        ids=str,
    )
    def test_too_few_scored(self, exchange: str, scored: Scored, welcome: bool) -> None:
        game = Game(spec_of(participation={"exchange": exchange}, batch_size=100))
        work = game.take()
        update = game.update_for(work, scored=scored)
        if welcome:
            game.send(work, update)
            assert game.state.round == 1
        else:
            assert "must be declined" in self.refused(game, work, update)

    @both
    def test_another_model(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        game.send(game.take())
        work = game.take()
        usage = Usage(queries=SAMPLES)
        refused = refusal(game.send(work, game.update_for(work, model="model-b", usage=usage)))
        assert refused.code == "model_mismatch"
        assert "'model-b'" in refused.detail
        # Such a client would not get better: its seat is free, its lease settled.
        assert game.state.seats == ()
        assert game.leased == NOTHING
        assert game.spent.queries == 2 * SAMPLES
        assert game.state.round == 1

    def test_the_gateway_s_model_is_known_from_the_start(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        update = game.update_for(work, model="model-b")
        assert refusal(game.send(work, update)).code == "model_mismatch"

    @both
    def test_extreme_numbers_cannot_break_a_round(self, exchange: str) -> None:
        """The largest numbers that an update may have, from both clients of a round."""
        game = Game(spec_of(rounds=1, participation={"exchange": exchange, "clients_per_round": 2}))
        for client in game.seat():
            work = game.claim(client)
            assert work is not None
            changes: dict[str, Any] = {"num_examples": 2**31}
            if exchange == "losses":
                changes["losses"] = (1e6, -1e6, 1e6, 1e6)
            else:
                changes["alpha"] = Tensor.pack([MAX_ALPHA] * 6, (2, 3), "float32")
                changes["mean_loss"] = 1e6
            game.send(work, game.update_for(work, **changes))
        assert game.state.status == "completed"
        assert np.isfinite(game.state.method.alpha).all()
