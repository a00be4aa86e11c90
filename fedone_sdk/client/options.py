"""The options of an edge client: which work it accepts, and the app's functions."""

from __future__ import annotations

from dataclasses import dataclass

from fedone_sdk.client.batch import BeforeSend
from fedone_sdk.client.condition import OnlyWhen
from fedone_sdk.client.events import OnEvent
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import Claim, Enrol, is_sendable
from fedone_sdk.spec import validate_spec
from fedone_sdk.spec.sections import RequiredPrivacy
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
    """

    before_send: BeforeSend | None = None
    only_when: OnlyWhen | None = None
    on_event: OnEvent | None = None
    score: ScoreFunction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPolicy:
    """Which work an edge client accepts.

    Attributes:
        run_id: Accepts work of this run only; None accepts work of any run.
        privacy: Declines work with less noise than this, and work that would exceed its
            `max_epsilon`. The count of epsilon is kept in the client's `state_dir` (extra
            ``privacy``). None accepts work without noise.
    """

    run_id: str | None = None
    privacy: RequiredPrivacy | None = None


def check_arguments(*, name: str | None, run_id: str | None, wait_s: float) -> None:
    """Check the arguments that become fields of messages; a turn would fail with them otherwise.

    Raises:
        SpecError: A message cannot carry one of them.
    """
    validate_spec(Enrol, {"name": name}, source="arguments")
    claim = {"num_examples": 1, "run_id": run_id, "wait_s": wait_s}
    validate_spec(Claim, claim, source="arguments")


def token_of(given: str | None) -> str | None:
    """Return the enrolment token without surrounding whitespace; None if it is empty.

    Raises:
        SpecError: It has characters that a header cannot carry; the error does not repeat it.
    """
    # Files with a secret often end with a newline, which a header cannot carry.
    token = (given or "").strip()
    if token and not is_sendable(token):
        raise ArgumentError(
            "token: has characters that a token cannot have; allowed is printable ASCII"
        )
    return token or None
