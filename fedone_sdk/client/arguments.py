"""What an app gives an edge client, looked at before anything is sent."""

from __future__ import annotations

from fedone_sdk.errors import SpecError
from fedone_sdk.messages import Claim, Enrol, is_sendable
from fedone_sdk.spec import validate_spec

__all__ = ["check_arguments", "token_of"]


def check_arguments(*, name: str | None, run_id: str | None, wait_s: float) -> None:
    """Looks whether messages can carry what an app gives; else it would fail amid a turn.

    Raises:
        SpecError: They cannot.
    """
    validate_spec(Enrol, {"name": name}, source="arguments")
    claim = {"num_examples": 1, "run_id": run_id, "wait_s": wait_s}
    validate_spec(Claim, claim, source="arguments")


def token_of(given: str | None) -> str | None:
    """The enrolment token; None where there is none.

    Args:
        given: A secret, which no error repeats.

    Raises:
        SpecError: It cannot be one.
    """
    # A newline at the end of a secret's file is common, and not allowed in a header.
    token = (given or "").strip()
    if token and not is_sendable(token):
        raise SpecError(
            "token: holds characters that no token has; allowed is printable ASCII",
            source="arguments",
        )
    return token or None
