"""The app's own functions that an edge client calls."""

from __future__ import annotations

from dataclasses import dataclass

from fedone_sdk.client.batch import BeforeSend
from fedone_sdk.client.condition import OnlyWhen
from fedone_sdk.client.events import OnEvent
from fedone_sdk.client.trainer import Trainer
from fedone_sdk.task import ScoreFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The app's own functions that an edge client calls.

    Attributes:
        before_send: Gets every text before it is scored. Returns it, a redacted form, or None to
            hold the example back. Plain or async; an exception holds the example back.
        only_when: Whether the device may work now, for instance while it charges. Called before
            each claim and before each request for scores. Plain or async; an exception counts as
            False. Work in progress waits while its lease can be renewed, and is declined then.
        on_event: Receives a `ClientEvent` for each step of progress, in the client's thread; it
            should return at once. Its exceptions are logged.
        score: ``score(generated, example)`` from 0 to 1, for runs with loss ``score``.
        trainer: Trains the soft prompts of white-box methods; without one such work is declined.
    """

    before_send: BeforeSend | None = None
    only_when: OnlyWhen | None = None
    on_event: OnEvent | None = None
    score: ScoreFunction | None = None
    trainer: Trainer | None = None
