"""Validation of an edge client's arguments, before anything is sent."""

from __future__ import annotations

from fedone_sdk.errors import SpecError
from fedone_sdk.messages import Claim, Enrol, is_sendable
from fedone_sdk.spec import validate_spec


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

    Args:
        given: The secret; errors do not repeat it.

    Raises:
        SpecError: It has characters that a header cannot carry.
    """
    # Files with a secret often end with a newline, which a header cannot carry.
    token = (given or "").strip()
    if token and not is_sendable(token):
        raise SpecError(
            "token: has characters that a token cannot have; allowed is printable ASCII",
            source="arguments",
        )
    return token or None
