"""What may be told of a failure: where its words may quote private text, only its kind."""

from __future__ import annotations

from pydantic import ValidationError

from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetError,
    FedOneError,
    LabelWordError,
)

__all__ = ["problem_of", "reason_of"]

_KINDS: dict[type[Exception], str] = {
    LabelWordError: "a label word is not one token of the client's model",
    BackendBlocked: "the client's model cannot be asked until somebody changes something",
    BackendUnavailable: "the client's model cannot be asked now",
    BackendError: "the client's model failed",
    BudgetError: "the budget of the client's model has nothing left for this",
}
"""The first that fits counts."""


def reason_of(failure: Exception) -> str:
    """Why work is given back, for the server and the app.

    Who refuses a request may quote it: what a model of one's own says stays in the device's log.

    Args:
        failure: What ended the work.
    """
    for kind, words in _KINDS.items():
        if isinstance(failure, kind):
            return words
    if not isinstance(failure, FedOneError):
        return f"the client failed with {type(failure).__name__}"
    return str(failure)


def problem_of(refusal: ValidationError) -> str:
    """Where a message is malformed, and how.

    Args:
        refusal: The first of its problems is told, without the input: it may hold a credential or
            private text.
    """
    first = refusal.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(step) for step in first["loc"])[:100]
    return f"{where}: {first['msg'][:200]}"
